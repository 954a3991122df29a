"""How many bytes the models of a step hold on each process, counted without loading them.

A model that trains takes what its engine predicts for its ZeRO stage and the number of processes;
one that only answers takes its weights. Activations and the KV cache come on top; they grow with
micro-batch and length.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pipeline.config import EMBEDDED, FrozenModelConfig, StepConfig, TrainedModelConfig
from pipeline.errors import ModelError

SCORERS: Mapping[str, Collection[str]] = {"reward": ("model",), "ppo": ("critic", "reward")}
"""By the step's section the models that score; the others are language models."""

SHARDED_LIKE = {"reference": "actor", "reward": "critic"}
"""In step 3 the frozen models that are sharded as a trained one is."""


@dataclass(frozen=True)
class Row:
    """The memory of one model in one step."""

    role: str
    path: str

    parameters: int | None
    """Adapters included; None: not known without downloading the model."""

    num_bytes: Mapping[str, int]
    """On each process, by the kinds of `pipeline.engine.predict`."""

    places: Mapping[str, str]
    """Of the kinds that are offloaded: where to."""

    def sum(self, *kinds: str) -> int:
        """Bytes of these kinds."""
        return sum(self.num_bytes.get(kind, 0) for kind in kinds)

    @property
    def on_device(self) -> int:
        """Bytes that stay where the model computes."""
        return self.sum(*(self.num_bytes.keys() - self.places.keys()))

    @property
    def offloaded(self) -> int:
        """Bytes elsewhere: in host memory, or on a disk."""
        return self.sum(*self.places)


def memory_rows(
    config: StepConfig, origins: Mapping[str, str], *, section: str, world: int, gpus: int
) -> list[Row]:
    """One row for each model of the step.

    Args:
        config: the step's settings.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
        section: the step's name in files of settings: sft, reward or ppo.
        world: processes of the step.
        gpus: GPUs of this machine; `auto` precision is taken as bf16 where there are any.
    """
    rows: list[Row] = []
    for field in fields(config):
        model = getattr(config, field.name)
        if not isinstance(model, FrozenModelConfig):
            continue
        model = model if model.path is not None else _stands_in(config, field.name)
        if model is None:
            continue
        counted = _Counted(config, field.name, section=section, world=world, gpus=gpus)
        rows.append(counted.row(model, _source(str(model.path), origins)))
    return rows


@dataclass(frozen=True)
class _Counted:
    """A model of a step on so many processes."""

    config: StepConfig
    role: str
    section: str
    world: int
    gpus: int

    def row(self, model: FrozenModelConfig, source: str | None) -> Row:
        unknown = Row(self.role, str(model.path), None, {}, {})
        if source is None:
            return unknown
        import torch

        from pipeline.engine.predict import offloaded, predict
        from pipeline.models.meta import model_on_meta

        device = torch.device("cuda" if self.gpus else "cpu")
        precision = "bf16" if model.precision == "auto" and self.gpus else model.precision
        model = replace(model, path=source, precision=precision)
        scores = self.role in SCORERS.get(self.section, ())
        try:
            module = model_on_meta(model, task="classifier" if scores else "causal", device=device)
        except ModelError:
            return unknown
        settings = model if isinstance(model, TrainedModelConfig) else self._sharded_like()
        parameters = sum(param.numel() for param in module.parameters())
        if settings is None:
            weights = sum(param.nbytes for param in module.parameters())
            return replace(unknown, parameters=parameters, num_bytes={"weights": weights})
        num_bytes = predict(
            module,
            settings,
            world=self.world,
            device=device,
            micro_batches=-(-self.config.batch_size // (self.config.micro_batch_size * self.world)),
            generates=(self.section, self.role) == ("ppo", "actor"),
        )
        places = offloaded(settings, device)
        if settings is not model:
            num_bytes = {kind: num_bytes[kind] for kind in ("weights", "gathered")}
        places = {kind: place for kind, place in places.items() if num_bytes.get(kind)}
        return replace(unknown, parameters=parameters, num_bytes=num_bytes, places=places)

    def _sharded_like(self) -> TrainedModelConfig | None:
        """The trained model whose sharding a frozen one shares; below stage 3 it stays whole."""
        like = SHARDED_LIKE.get(self.role) if self.section == "ppo" else None
        settings: TrainedModelConfig | None = getattr(self.config, like) if like else None
        return settings if settings is not None and settings.zero_stage == 3 else None


def _stands_in(config: StepConfig, role: str) -> FrozenModelConfig | None:
    """The reference is a copy of the actor, except where the actor trains adapters only."""
    actor = getattr(config, "actor", None)
    if role != "reference" or not isinstance(actor, TrainedModelConfig) or actor.lora:
        return None
    if actor.path is None:
        return None
    shared = {field.name: getattr(actor, field.name) for field in fields(FrozenModelConfig)}
    return FrozenModelConfig(**shared)


def _source(path: str, origins: Mapping[str, str]) -> str | None:
    """Where the model's configuration is; None where only its name is known."""
    if path == EMBEDDED or (Path(path).expanduser() / "config.json").is_file():
        return path
    if path in origins:
        return _source(origins[path], origins)
    return _cached(path)


def _cached(name: str) -> str | None:
    """The directory of a Hub model that was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return str(Path(config).parent) if isinstance(config, str) else None
