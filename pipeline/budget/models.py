"""The models of a step, without memory for their weights."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline.config import (
    EMBEDDED,
    FrozenModelConfig,
    LoraConfig,
    Precision,
    Quantize,
    TrainedModelConfig,
    Workload,
)
from pipeline.errors import ModelError
from pipeline.hub import cached_file
from pipeline.models.known import KNOWN

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from pipeline.engine.units import UnitParams


@dataclass(frozen=True)
class CountedModel:
    """A model of a step."""

    role: str

    path: str
    """As the settings have it."""

    settings: FrozenModelConfig
    """With the place of its configuration, and no `auto` precision."""

    module: "nn.Module | None"
    """On the meta device, with its adapters; None where its configuration is not here."""

    scores: bool
    """Whether it is a classifier rather than a language model."""

    sharded_like: TrainedModelConfig | None
    """The trained model whose sharding a frozen one shares; below stage 3 it stays whole."""

    @property
    def trained(self) -> TrainedModelConfig | None:
        """Its settings, if it learns."""
        return self.settings if isinstance(self.settings, TrainedModelConfig) else None

    @property
    def engine(self) -> TrainedModelConfig | None:
        """The settings by which an engine lays it out; None leaves it as it is loaded."""
        return self.trained or self.sharded_like

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a piece of its weights alone."""
        return self.engine is not None and self.engine.zero_stage == 3

    @property
    def present(self) -> "nn.Module":
        """The module, where there is one."""
        assert self.module is not None
        return self.module

    @property
    def plain(self) -> "PreTrainedModel":
        """The model inside its adapters."""
        from pipeline.models.forward import base_model

        return base_model(self.present)

    @property
    def parameters(self) -> int:
        """Adapters included, and quantized weights counted as what they stand for."""
        from pipeline.models.quantized import num_weights

        return num_weights(self.present)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, as they are loaded."""
        return sum(param.nbytes for param in self.present.parameters())

    @property
    def read_bytes(self) -> int:
        """Bytes of the model's weights while it is loaded.

        One that only answers is read whole and then quantized; of one that learns, or is sharded,
        each weight is quantized as it is read.
        """
        from pipeline.models.quantized import parts_bytes, quantized_layers

        if self.trained is not None or self.is_sharded:
            return self.weight_bytes
        layers = quantized_layers(self.present).values()
        return self.weight_bytes + sum(each.num_bytes - parts_bytes(each) for each in layers)

    def units(self) -> "list[UnitParams]":
        """What is gathered together, the root last."""
        from pipeline.engine.units import engine_units

        return engine_units(self.present, self.engine.zero.unit_classes if self.engine else ())


def models_of(
    workload: Workload, origins: Mapping[str, str], *, has_gpu: bool
) -> list[CountedModel]:
    """The models that a step loads, in the order in which it does.

    Args:
        workload: what the step does.
        origins: for a directory that an earlier step has yet to fill, the model it starts from.
        has_gpu: `auto` precision is bf16 then.
    """
    return [
        model_of(
            use.settings,
            origins,
            role=use.role,
            has_gpu=has_gpu,
            scores=use.scores,
            sharded_like=use.sharded_like,
        )
        for use in workload.models
        if use.settings.path is not None
    ]


def model_of(
    settings: FrozenModelConfig,
    origins: Mapping[str, str],
    *,
    role: str = "actor",
    has_gpu: bool = False,
    scores: bool = False,
    sharded_like: TrainedModelConfig | None = None,
) -> CountedModel:
    """A model by its settings; `origins` and `has_gpu` as for `models_of`."""
    path = str(settings.path)
    source = _source(path, origins)
    precision: Precision = "bf16" if has_gpu else "fp32"
    precision = precision if settings.precision == "auto" else settings.precision
    settings = replace(settings, path=source or path, precision=precision)
    module = None if source is None else _module(settings, scores=scores)
    return CountedModel(role, path, settings, module, scores, sharded_like)


def _module(settings: FrozenModelConfig, *, scores: bool) -> "nn.Module | None":
    try:
        return _on_meta(
            str(settings.path),
            settings.precision,
            "classifier" if scores else "causal",
            settings.lora if isinstance(settings, TrainedModelConfig) else None,
            trains=isinstance(settings, TrainedModelConfig),
            trust_remote_code=settings.trust_remote_code,
            quantized=(settings.quantize, settings.double_quant),
        )
    except ModelError:
        return None


@functools.lru_cache(maxsize=16)
def _on_meta(
    path: str,
    precision: Precision,
    task: Literal["causal", "classifier"],
    lora: LoraConfig | None,
    *,
    trains: bool,
    trust_remote_code: bool,
    quantized: tuple[Quantize, bool],
) -> "nn.Module":
    import torch

    from pipeline.models.meta import model_on_meta

    quantize, double = quantized
    frozen = FrozenModelConfig(
        path=path,
        precision=precision,
        trust_remote_code=trust_remote_code,
        quantize=quantize,
        double_quant=double,
    )
    shared = {field.name: getattr(frozen, field.name) for field in fields(FrozenModelConfig)}
    settings = TrainedModelConfig(**shared, lora=lora) if trains else frozen
    return model_on_meta(settings, task=task, device=torch.device("cpu"))


def _source(path: str, origins: Mapping[str, str]) -> str | None:
    """Where the model's configuration is; None where only its name is known."""
    if path == EMBEDDED or (Path(path).expanduser() / "config.json").is_file():
        return path
    if path in origins:
        return _source(origins[path], origins)
    return _cached(path) or (path if path in KNOWN else None)


def _cached(name: str) -> str | None:
    """The directory of a Hub model that was downloaded before."""
    config = cached_file(name, "config.json")
    return None if config is None else str(Path(config).parent)
