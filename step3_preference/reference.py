"""Log-probabilities of the reference, computed once and stored."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from inference.replica import Replica
from pipeline.data.batches import RowStream
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.sharing.prompts import fingerprint
from pipeline.data.sharing.steps import StepData
from pipeline.engine.engine import Engine
from pipeline.files.durable import replace_durably
from pipeline.models.forward.forward import Policy
from pipeline.models.passes import Passes, evaluating
from pipeline.parallel.device import local_device, to_device
from pipeline.parallel.mesh import current_mesh
from pipeline.run.training import Rows
from pipeline.system.errors import DataError
from step3_preference.config import PreferenceConfig
from step3_preference.rows import (
    ComparedBatch,
    Row,
    RowBatch,
    RowOutcome,
    cut,
    fit,
    mismatched_batches,
)

logger = logging.getLogger(__name__)


KEPT: tuple[RowOutcome, ...] = ("whole", "cut")
"""Outcomes of rows that are trained on."""


class RowStore:
    """The step's training and held-out rows, without uninformative or too long ones."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.held_out: list[Row] = []
        self._examples: Sequence[Example] = ()

    def sift(self, data: StepData, chat: ChatFormat) -> StepData:
        """Keep the trainable rows. A collective.

        Raises:
            DataError: no rows are left to train on or to evaluate; or kto's responses are all good
                or all bad.
        """
        self._chat = chat
        train, evaluated = self._keep("training", data.train), self._keep("held-out", data.eval)
        evaluated = evaluated[: self.config.data.max_eval_rows]
        if self.config.is_unpaired:
            _require_both("training", train)
            _require_both("held-out", evaluated)
        self._examples = train
        self.held_out = [fit(example, chat, self.config)[0] for example in evaluated]
        return replace(data, train=train, eval=evaluated)

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def num_good(self) -> int:
        """Number of training rows with a chosen response, or for kto a good one."""
        return sum(bool(example.chosen) for example in self._examples)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The training rows with these indices."""
        return [fit(self._examples[row], self._chat, self.config)[0] for row in numbers]

    def _keep(self, name: str, examples: Sequence[Example]) -> list[Example]:
        """The trainable examples; each process encodes a share of them."""
        data = current_mesh().data
        own: list[RowOutcome] = [fit(x, self._chat, self.config)[1] for x in data.shard(examples)]
        gathered = data.gather_objects(own)
        outcomes: list[RowOutcome] = [
            gathered[row % data.size][row // data.size] for row in range(len(examples))
        ]
        _report(name, Counter(outcomes), len(examples), self.config)
        return [
            example for example, outcome in zip(examples, outcomes, strict=True) if outcome in KEPT
        ]


def _report(
    name: str, outcomes: Counter[RowOutcome], number: int, config: PreferenceConfig
) -> None:
    _require_some(name, outcomes, number, config)
    cut, reasons = outcomes["cut"], _left_out(outcomes)
    facts = [f"{cut} lose the start of their prompt"] if cut else []
    facts += [f"{reasons} and are skipped"] if reasons else []
    if facts:
        limit, text = config.data.max_length, "; ".join(facts)
        logger.info("of %d %s rows at data.max_length %d, %s", number, name, limit, text)


def _left_out(outcomes: Counter[RowOutcome]) -> str:
    """Return the numbers of skipped rows, with reasons."""
    out = {
        "don't fit": outcomes["too long"],
        "have equal responses": outcomes["equal"],
        "have a response without trained tokens": outcomes["untrained"],
    }
    return ", ".join(f"{count} {why}" for why, count in out.items() if count)


def _require_some(
    name: str, outcomes: Counter[RowOutcome], number: int, config: PreferenceConfig
) -> None:
    if not outcomes["whole"] + outcomes["cut"]:
        limit = f" at data.max_length {config.data.max_length}; raise it, or inspect the rows"
        raise DataError(
            f"none of the {number} {name} rows can be trained on:"
            f" {_left_out(outcomes)}{limit if outcomes['too long'] else '; inspect them'} with"
            " `python -m pipeline.data.inspect`"
        )


def _require_both(name: str, examples: Sequence[Example]) -> None:
    good = sum(bool(each.chosen) for each in examples)
    if good in (0, len(examples)):
        missing = "good" if good == 0 else "bad"
        raise DataError(
            f"none of the {len(examples)} {name} responses is {missing}: kto needs pairs, or"
            " responses with a label of true or false"
        )


FILE = "reference.safetensors"


class Start:
    """The actor's initial weights; construct it before the state of a run is loaded."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        engine = self.engine = passes.engine
        model = cast("Policy", engine.model).model
        self._adapted = model if isinstance(model, PeftModel) else None
        self._masters: list[Tensor] = [] if self._adapted is not None else _copies(engine)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context with the initial actor in evaluation mode; all processes enter together."""
        with evaluating(self.engine.model):
            if self._adapted is not None:
                with self._adapted.disable_adapter():
                    yield
                return
            now = _copies(self.engine)
            self.engine.load_masters(self._masters)
            try:
                yield
            finally:
                self.engine.load_masters(now)


def log_probabilities(passes: Passes, batches: Sequence[RowBatch]) -> list[Float[Tensor, " S"]]:
    """Log-probability of each response, by batch, without gradients; only on the last stage."""
    engine = passes.engine
    with evaluating(engine.model):
        return passes.forward(batches, lambda batch: batch.sums(engine(batch.tokens).logprobs))


def _copies(engine: Engine) -> list[Tensor]:
    return [master.to("cpu", copy=True) for master in engine.masters()]


@dataclass(frozen=True)
class Table:
    """Log-probabilities of the reference; NaN if not needed."""

    train: Float[Tensor, "N 2"]
    """Log-probabilities of the chosen and rejected response of each training row."""

    held_out: Float[Tensor, "M 2"]

    mismatched: Float[Tensor, " P"]
    """Log-probabilities of the mismatched responses of kto, in the order of the step's rows."""

    mismatched_held_out: Float[Tensor, " Q"]


class Reference:
    """The losses' reference: a table, the actor without its adapter, or nothing."""

    def __init__(self, start: Start, config: PreferenceConfig, table: Table | None) -> None:
        self.start = start
        self.config = config
        self.table = table

    def compared(
        self, batches: Sequence[RowBatch], stored: Float[Tensor, "B 2"] | None
    ) -> list[ComparedBatch]:
        """The batches of some rows, with the reference's log-probabilities.

        These are 0 without a reference, taken from `stored` if given, and otherwise computed.
        """
        found: list[Tensor | None]
        if self.config.reference_free:
            found = [torch.zeros(len(each.counts), device=local_device()) for each in batches]
        elif stored is None:
            with self.start.applied():
                found = [*log_probabilities(self.start.passes, batches)]
            found = found or [None] * len(batches)
        else:
            found = [_of_sides(each, stored) for each in batches]
        return [ComparedBatch(*each) for each in zip(batches, found, strict=True)]

    def of_rows(self, numbers: Sequence[int]) -> Float[Tensor, "B 2"] | None:
        """Log-probabilities of training rows by number; None if they are computed on the fly."""
        return None if self.table is None else self.table.train[list(numbers)]

    @property
    def of_held_out(self) -> Float[Tensor, "M 2"] | None:
        """Log-probabilities of the held-out rows; None if they are computed on the fly."""
        return None if self.table is None else self.table.held_out

    def z0(self, rows: Sequence[Row], *, first: int | None) -> float:
        """KTO's reference point for these rows, over the whole step and all processes.

        max(0, the mean log-ratio of each prompt with another row's response), which estimates the
        KL to the reference (Ethayarajh et al. 2024, section 4.1).

        Args:
            rows: rows of the step, or held-out ones.
            first: position of the first row in the order of training; None for held-out rows.
        """
        if not self.config.is_unpaired:
            return 0.0
        stored: Tensor | None = None
        if self.table is not None and first is None:
            stored = self.table.mismatched_held_out
        elif self.table is not None and first is not None:
            stored = self.table.mismatched[first : first + len(rows)]
        passes, batches = self.start.passes, mismatched_batches(rows, self.config)
        own = log_probabilities(passes, batches)
        if stored is None:
            with self.start.applied():
                theirs = log_probabilities(passes, batches)
        else:
            theirs = [to_device(stored[list(batch.chosen)]) for batch in batches]
        # Only the last pipeline stage has values.
        ratios = [(mine - other).sum() for mine, other in zip(own, theirs, strict=False)]
        return max(0.0, current_mesh().data.sum(passes.total(ratios)) / len(rows))


def _of_sides(batch: RowBatch, stored: Float[Tensor, "B 2"]) -> Float[Tensor, " S"]:
    """Stored log-probabilities of the sequences of a batch."""
    both = [stored[list(batch.chosen), 0], stored[list(batch.rejected), 1]]
    return to_device(torch.cat(both))


def open_reference(
    start: Start, rows: Rows, store: RowStore, config: PreferenceConfig
) -> Reference:
    """Open the reference; its table is read from the output directory, or computed and written.

    Args:
        start: the initial actor.
        rows: training rows in order; only those that the run uses are needed.
        store: the rows as token ids.
        config: settings of the step.
    """
    if not config.precomputes:
        return Reference(start, config, None)
    bound_to = _bound_to(start, rows, config)
    path = config.output_dir / FILE
    mesh = current_mesh()
    table = mesh.world.gather_objects(_read(path, bound_to) if mesh.is_main else None)[0]
    if table is None:
        logger.info("computing the reference's log-probabilities, once")
        table = _compute(start, rows.total_steps, store, config)
        if mesh.is_main:
            replace_durably(path, save(vars(table).copy(), {"fingerprint": bound_to}))
    else:
        logger.info("the reference's log-probabilities are those of %s", path)
    return Reference(start, config, table)


def _bound_to(start: Start, rows: Rows, config: PreferenceConfig) -> str:
    """Fingerprint of the rows, format and weights that the table is computed from."""
    engine = start.engine
    replica = Replica(
        cast("Policy", engine.model).model,
        shares=not engine.sharded,
        tp_group=engine.tensor.untracked,
        trained_by=engine.tensor,
        stages=engine.stages,
    )
    replica.load(engine)
    weights = replica.weights_hash()
    replica.release()
    known = {
        "rows": [fingerprint(rows.data.train), fingerprint(rows.data.eval)],
        "order": [config.seed, config.batch_size, rows.total_steps],
        "format": [rows.chat.template, config.data.max_length, config.too_long, config.is_unpaired],
        "weights": weights,
        "dtype": [str(next(engine.model.parameters()).dtype), str(local_device().type)],
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _read(path: Path, bound_to: str) -> Table | None:
    """Read the table from its file; None if that is missing, damaged or of another run."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("fingerprint") != bound_to:
                return None
            return Table(**{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except Exception:  # noqa: BLE001  # missing or damaged: the values can be recomputed
        return None


def _compute(start: Start, total_steps: int, store: RowStore, config: PreferenceConfig) -> Table:
    """Compute the table in the training batches, for bitwise equality with the first step."""
    stream = RowStream(num_rows=len(store), batch_size=config.batch_size, seed=config.seed)
    held_out = store.held_out
    train: dict[tuple[int, int], float] = {}
    mismatched: dict[int, float] = {}
    needed = min(total_steps * config.batch_size, stream.num_rows)
    batches = total_steps if config.is_unpaired else -(-needed // config.batch_size)
    with start.applied():
        for index in range(batches):
            numbers = next(stream)
            rows = store.rows(numbers)
            before = index * config.batch_size
            if before < needed:
                for (place, side), value in _of_rows(start.passes, rows, config).items():
                    if before + place < needed:  # later rows are repeats
                        train[numbers[place], side] = value
            for place, value in _of_mismatched(start.passes, rows, config).items():
                mismatched[before + place] = value
        of_held_out = _of_rows(start.passes, held_out, config)
        others = _of_mismatched(start.passes, held_out, config)
    own = start.passes.from_last((train, mismatched, of_held_out, others))
    gathered = current_mesh().data.gather_objects(own)
    first, second, third, fourth = (_merged(parts) for parts in zip(*gathered, strict=True))
    places = batches * config.batch_size if config.is_unpaired else 0
    return Table(
        _filled(torch.full((stream.num_rows, 2), torch.nan), first),
        _filled(torch.full((len(held_out), 2), torch.nan), third),
        _filled(torch.full((places,), torch.nan), second),
        _filled(torch.full((len(held_out) if config.is_unpaired else 0,), torch.nan), fourth),
    )


def _of_rows(
    passes: Passes, rows: Sequence[Row], config: PreferenceConfig
) -> dict[tuple[int, int], float]:
    """Log-probabilities of the responses in this process's micro-batches, by index and side."""
    found: dict[tuple[int, int], float] = {}
    batches = cut(rows, config)
    for batch, sums in zip(batches, log_probabilities(passes, batches), strict=False):
        places = [(each, 0) for each in batch.chosen] + [(each, 1) for each in batch.rejected]
        found |= dict(zip(places, sums[: len(places)].tolist(), strict=True))
    return found


def _of_mismatched(
    passes: Passes, rows: Sequence[Row], config: PreferenceConfig
) -> dict[int, float]:
    if not config.is_unpaired:
        return {}
    found: dict[int, float] = {}
    batches = mismatched_batches(rows, config)
    for batch, sums in zip(batches, log_probabilities(passes, batches), strict=False):
        found |= dict(zip(batch.chosen, sums[: len(batch.chosen)].tolist(), strict=True))
    return found


def _merged(parts: Sequence[Mapping[object, float]]) -> dict[object, float]:
    return {key: value for part in parts for key, value in part.items()}


def _filled(into: Tensor, values: Mapping[object, float]) -> Tensor:
    for place, value in values.items():
        into[cast("int", place)] = value
    return into
