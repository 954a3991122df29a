"""The reference's log-probabilities, computed once and stored."""

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
    BatchWithReference,
    Row,
    RowBatch,
    RowOutcome,
    mismatched_batches,
    split_rows,
    truncate_row,
)

logger = logging.getLogger(__name__)


TRAINABLE: tuple[RowOutcome, ...] = ("complete", "truncated")
"""Outcomes of rows that are trained on."""


class RowStore:
    """The step's training and held-out rows, without those that can't be trained on."""

    def __init__(self, config: PreferenceConfig) -> None:
        self.config = config
        self.held_out: list[Row] = []
        self._examples: Sequence[Example] = ()

    def select(self, data: StepData, chat: ChatFormat) -> StepData:
        """Keep the trainable rows; all processes must call this.

        Raises:
            DataError: no rows are left for training or for evaluation; or for kto, all responses
                are good, or all are bad.
        """
        self._chat = chat
        train, evaluated = self._select("training", data.train), self._select("held-out", data.eval)
        evaluated = evaluated[: self.config.data.max_eval_rows]
        if self.config.is_unpaired:
            _require_good_and_bad("training", train)
            _require_good_and_bad("held-out", evaluated)
        self._examples = train
        self.held_out = [truncate_row(example, chat, self.config)[0] for example in evaluated]
        return replace(data, train=train, eval=evaluated)

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def num_good(self) -> int:
        """Number of training rows that contain a chosen response or, for kto, a good one."""
        return sum(bool(example.chosen) for example in self._examples)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return the training rows with these indices."""
        return [truncate_row(self._examples[row], self._chat, self.config)[0] for row in indices]

    def _select(self, name: str, examples: Sequence[Example]) -> list[Example]:
        """Select the trainable examples; each process encodes a share of them."""
        data = current_mesh().data
        local: list[RowOutcome] = [
            truncate_row(row, self._chat, self.config)[1] for row in data.shard(examples)
        ]
        gathered = data.gather_objects(local)
        outcomes: list[RowOutcome] = [
            gathered[row % data.size][row // data.size] for row in range(len(examples))
        ]
        _log_outcomes(name, Counter(outcomes), len(examples), self.config)
        return [
            example
            for example, outcome in zip(examples, outcomes, strict=True)
            if outcome in TRAINABLE
        ]


def _log_outcomes(
    name: str, outcomes: Counter[RowOutcome], total: int, config: PreferenceConfig
) -> None:
    _require_trainable(name, outcomes, total, config)
    truncated, reasons = outcomes["truncated"], _describe_skipped(outcomes)
    facts = [f"truncated the prompt of {truncated}"] if truncated else []
    facts += [f"skipped {total - outcomes['complete'] - truncated} ({reasons})"] if reasons else []
    if facts:
        limit, text = config.data.max_length, ", ".join(facts)
        logger.info("%d %s rows at data.max_length %d: %s", total, name, limit, text)


def _describe_skipped(outcomes: Counter[RowOutcome]) -> str:
    """Return the number of skipped rows for each reason."""
    counts = {
        "too long": outcomes["too long"],
        "with identical responses": outcomes["equal"],
        "with a response without trained tokens": outcomes["untrained"],
    }
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def _require_trainable(
    name: str, outcomes: Counter[RowOutcome], total: int, config: PreferenceConfig
) -> None:
    if not outcomes["complete"] + outcomes["truncated"]:
        limit = f"raise data.max_length above {config.data.max_length}, or inspect the rows"
        raise DataError(
            f"none of the {total} {name} rows can be used"
            f" ({_describe_skipped(outcomes)}); {limit if outcomes['too long'] else 'inspect them'}"
            " with `python -m pipeline.data.inspect`"
        )


def _require_good_and_bad(name: str, examples: Sequence[Example]) -> None:
    good = sum(bool(example.chosen) for example in examples)
    if good in (0, len(examples)):
        missing = "good" if good == 0 else "bad"
        raise DataError(
            f"none of the {len(examples)} {name} responses is {missing}; kto needs pairs, or"
            " single responses with both labels, true and false"
        )


TABLE_FILE = "reference.safetensors"


class InitialActor:
    """The actor with its initial weights; construct it before the state of a run is loaded."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        engine = self.engine = passes.engine
        model = cast("Policy", engine.model).model
        self._peft_model = model if isinstance(model, PeftModel) else None
        self._masters: list[Tensor] = [] if self._peft_model is not None else _copy_masters(engine)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Use the initial actor in evaluation mode; all processes must enter this context."""
        with evaluating(self.engine.model):
            if self._peft_model is not None:
                with self._peft_model.disable_adapter():
                    yield
                return
            current = _copy_masters(self.engine)
            self.engine.load_masters(self._masters)
            try:
                yield
            finally:
                self.engine.load_masters(current)


def log_probabilities(passes: Passes, batches: Sequence[RowBatch]) -> list[Float[Tensor, " S"]]:
    """Compute the responses' log-probabilities without gradients; only the last stage has them."""
    engine = passes.engine
    with evaluating(engine.model):
        return passes.forward(batches, lambda batch: batch.sums(engine(batch.tokens).logprobs))


def _copy_masters(engine: Engine) -> list[Tensor]:
    return [master.to("cpu", copy=True) for master in engine.masters()]


@dataclass(frozen=True)
class ReferenceTable:
    """Log-probabilities under the reference; NaN where they are not needed."""

    train: Float[Tensor, "N 2"]
    """Log-probabilities of the chosen and the rejected response of each training row."""

    held_out: Float[Tensor, "M 2"]

    mismatched: Float[Tensor, " P"]
    """Log-probabilities of kto's mismatched responses, in the order of training."""

    mismatched_held_out: Float[Tensor, " Q"]


class Reference:
    """Provides the reference's log-probabilities, from a table or the actor without its adapter."""

    def __init__(
        self, initial_actor: InitialActor, config: PreferenceConfig, table: ReferenceTable | None
    ) -> None:
        self.initial_actor = initial_actor
        self.config = config
        self.table = table

    def add_reference(
        self, batches: Sequence[RowBatch], stored: Float[Tensor, "B 2"] | None
    ) -> list[BatchWithReference]:
        """Add the reference's log-probabilities to batches of rows.

        They are 0 without a reference, taken from `stored` if given, and otherwise computed.
        """
        logprobs: list[Tensor | None]
        if self.config.reference_free:
            logprobs = [torch.zeros(len(batch.counts), device=local_device()) for batch in batches]
        elif stored is None:
            with self.initial_actor.applied():
                logprobs = [*log_probabilities(self.initial_actor.passes, batches)]
            logprobs = logprobs or [None] * len(batches)
        else:
            logprobs = [_select_sides(batch, stored) for batch in batches]
        return [BatchWithReference(*pair) for pair in zip(batches, logprobs, strict=True)]

    def row_logprobs(self, indices: Sequence[int]) -> Float[Tensor, "B 2"] | None:
        """Return these training rows' log-probabilities, or None if they are computed as needed."""
        return None if self.table is None else self.table.train[list(indices)]

    @property
    def held_out_logprobs(self) -> Float[Tensor, "M 2"] | None:
        """Log-probabilities of the held-out rows; None if they are computed on the fly."""
        return None if self.table is None else self.table.held_out

    def z0(self, rows: Sequence[Row], *, first: int | None) -> float:
        """Compute KTO's reference point for these rows, over the whole step and all processes.

        It is max(0, mean log-ratio of prompts with another row's response), which estimates the KL
        to the reference (Ethayarajh et al. 2024, section 4.1).

        Args:
            rows: rows of an optimizer step, or held-out rows.
            first: position of the first row in the order of training; None for held-out rows.
        """
        if not self.config.is_unpaired:
            return 0.0
        stored: Tensor | None = None
        if self.table is not None and first is None:
            stored = self.table.mismatched_held_out
        elif self.table is not None and first is not None:
            stored = self.table.mismatched[first : first + len(rows)]
        passes, batches = self.initial_actor.passes, mismatched_batches(rows, self.config)
        policy = log_probabilities(passes, batches)
        if stored is None:
            with self.initial_actor.applied():
                reference = log_probabilities(passes, batches)
        else:
            reference = [to_device(stored[list(batch.chosen)]) for batch in batches]
        # Only the last pipeline stage has values.
        ratios = [(a - b).sum() for a, b in zip(policy, reference, strict=False)]
        return max(0.0, current_mesh().data.sum(passes.total(ratios)) / len(rows))


def _select_sides(batch: RowBatch, stored: Float[Tensor, "B 2"]) -> Float[Tensor, " S"]:
    """Select the stored log-probabilities of the sequences of a batch."""
    sides = [stored[list(batch.chosen), 0], stored[list(batch.rejected), 1]]
    return to_device(torch.cat(sides))


def open_reference(
    initial_actor: InitialActor, rows: Rows, store: RowStore, config: PreferenceConfig
) -> Reference:
    """Open the reference; read its table from the output directory, or compute and write it.

    Args:
        initial_actor: the actor with its initial weights.
        rows: the step's rows, and their number of training steps.
        store: the rows as token ids.
        config: settings of the step.
    """
    if not config.precomputes:
        return Reference(initial_actor, config, None)
    table_key = _compute_table_key(initial_actor, rows, config)
    path = config.output_dir / TABLE_FILE
    mesh = current_mesh()
    table = mesh.world.gather_objects(_read_table(path, table_key) if mesh.is_main else None)[0]
    if table is None:
        logger.info("computing the reference's log-probabilities once")
        table = _compute_table(initial_actor, rows.total_steps, store, config)
        if mesh.is_main:
            replace_durably(path, save(vars(table).copy(), {"fingerprint": table_key}))
    else:
        logger.info("using the reference's log-probabilities from %s", path)
    return Reference(initial_actor, config, table)


def _compute_table_key(initial_actor: InitialActor, rows: Rows, config: PreferenceConfig) -> str:
    """Compute a fingerprint of the rows, format and weights that determine the table."""
    engine = initial_actor.engine
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
    inputs = {
        "rows": [fingerprint(rows.data.train), fingerprint(rows.data.eval)],
        "order": [config.seed, config.batch_size, rows.total_steps],
        "format": [rows.chat.template, config.data.max_length, config.too_long, config.is_unpaired],
        "weights": weights,
        "dtype": [str(next(engine.model.parameters()).dtype), str(local_device().type)],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _read_table(path: Path, table_key: str) -> ReferenceTable | None:
    """Read the table; return None if its file is missing, damaged or from another run."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("fingerprint") != table_key:
                return None
            return ReferenceTable(**{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except Exception:  # noqa: BLE001  # missing or damaged: the values can be recomputed
        return None


def _compute_table(
    initial_actor: InitialActor, total_steps: int, store: RowStore, config: PreferenceConfig
) -> ReferenceTable:
    """Compute the table from the training batches, so that it matches the first step bitwise."""
    stream = RowStream(num_rows=len(store), batch_size=config.batch_size, seed=config.seed)
    passes, held_out = initial_actor.passes, store.held_out
    train: dict[tuple[int, int], float] = {}
    mismatched: dict[int, float] = {}
    needed = min(total_steps * config.batch_size, stream.num_rows)
    batches = total_steps if config.is_unpaired else -(-needed // config.batch_size)
    with initial_actor.applied():
        for batch in range(batches):
            indices = next(stream)
            rows = store.rows(indices)
            offset = batch * config.batch_size
            if offset < needed:
                for (index, side), value in _row_logprobs(passes, rows, config).items():
                    if offset + index < needed:  # later rows are repeated
                        train[indices[index], side] = value
            for index, value in _mismatched_logprobs(passes, rows, config).items():
                mismatched[offset + index] = value
        held_out_values = _row_logprobs(passes, held_out, config)
        held_out_mismatched = _mismatched_logprobs(passes, held_out, config)
    local = passes.from_last_stage((train, held_out_values, mismatched, held_out_mismatched))
    gathered = current_mesh().data.gather_objects(local)
    merged = (_merge(parts) for parts in zip(*gathered, strict=True))
    counts = (batches * config.batch_size, len(held_out)) if config.is_unpaired else (0, 0)
    shapes = ((stream.num_rows, 2), (len(held_out), 2), *((count,) for count in counts))
    columns = zip(shapes, merged, strict=True)
    return ReferenceTable(*(_fill(torch.full(shape, torch.nan), x) for shape, x in columns))


def _row_logprobs(
    passes: Passes, rows: Sequence[Row], config: PreferenceConfig
) -> dict[tuple[int, int], float]:
    """Compute the log-probabilities of this process's responses, by row index and side."""
    logprobs: dict[tuple[int, int], float] = {}
    batches = split_rows(rows, config)
    for batch, sums in zip(batches, log_probabilities(passes, batches), strict=False):
        keys = [(index, 0) for index in batch.chosen] + [(index, 1) for index in batch.rejected]
        logprobs |= dict(zip(keys, sums[: len(keys)].tolist(), strict=True))
    return logprobs


def _mismatched_logprobs(
    passes: Passes, rows: Sequence[Row], config: PreferenceConfig
) -> dict[int, float]:
    if not config.is_unpaired:
        return {}
    logprobs: dict[int, float] = {}
    batches = mismatched_batches(rows, config)
    for batch, sums in zip(batches, log_probabilities(passes, batches), strict=False):
        logprobs |= dict(zip(batch.chosen, sums[: len(batch.chosen)].tolist(), strict=True))
    return logprobs


def _merge(parts: Sequence[Mapping[object, float]]) -> dict[object, float]:
    return {key: value for part in parts for key, value in part.items()}


def _fill(tensor: Tensor, values: Mapping[object, float]) -> Tensor:
    for key, value in values.items():
        tensor[cast("int", key)] = value
    return tensor
