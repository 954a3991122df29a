"""The models of a step on the meta device, and the sizes that the memory formulas need."""

import copy
import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import (
    EMBEDDED,
    FrozenModelConfig,
    LoraConfig,
    ModelUse,
    ParallelConfig,
    Precision,
    TrainedModelConfig,
    Workload,
)
from pipeline.models.hf.known import KNOWN_CONFIGS
from pipeline.system.errors import ModelError
from pipeline.system.hub import cached_file

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; bytes of weights are counted in the format in which they are loaded."""

    layers: int
    hidden: int
    vocabulary: int
    key_heads: int
    """Number of key/value heads per layer."""

    kv_width: int
    """Number of elements in one token's keys, per layer."""

    saved_elements: int
    """Number of elements saved for the backward pass, per token and block."""

    itemsize: int
    """Bytes per activation element."""

    block_bytes: int
    """Bytes of the weights in all blocks."""

    root_bytes: int
    """Bytes of the weights outside the blocks: embeddings, head and final norm."""

    block_trained: int
    """Number of trained parameters in all blocks."""

    root_trained: int

    merged_bytes: int
    """Bytes of the weights without adapters or quantization."""

    context: int

    is_tied: bool
    """Whether the head is tied to the embedding."""

    head_is_trained: bool


@dataclass(frozen=True)
class CountedModel:
    """A model that a step uses, and the number of its parameters."""

    use: ModelUse
    path: str

    settings: FrozenModelConfig
    """Settings, with the location of the model's configuration and a resolved precision."""

    module: "nn.Module"
    """The model on the meta device, with its adapters."""

    @property
    def role(self) -> str:
        """Name of the model's field in the step's settings."""
        return self.use.role

    @property
    def trained(self) -> TrainedModelConfig | None:
        """The model's settings if it is trained, otherwise None."""
        return self.settings if isinstance(self.settings, TrainedModelConfig) else None

    @property
    def engine(self) -> TrainedModelConfig | None:
        """Settings of the engine that shards the model; None if no engine shards it."""
        return self.trained or self.use.sharded_like

    @functools.cached_property
    def parameters(self) -> int:
        """Number of weights, including adapters; quantized weights are counted individually."""
        from pipeline.models.adapters.quantized import num_weights

        return num_weights(self.module)

    @functools.cached_property
    def shape(self) -> Shape:
        """The model's sizes."""
        from pipeline.models.forward.forward import base_model

        return _compute_shape(self.module, base_model(self.module), self.parameters)


@functools.lru_cache(maxsize=256)
def check_shardable(module: "nn.Module", parallel: ParallelConfig) -> None:
    """Check that a model on the meta device can be sharded and split as `parallel` requires.

    Raises:
        ConfigError, ModelError: the model can't be sharded or split this way.
    """
    from pipeline.models.parallel.stages import balance_blocks, build_stage
    from pipeline.models.parallel.tensor_parallel import shard_for_plan

    if parallel.tp > 1:
        shard_for_plan(copy.deepcopy(module), parallel.tp, sequence=parallel.sequence)
    if parallel.pp > 1:
        blocks = balance_blocks(module, parallel.pp)
        build_stage(copy.deepcopy(module), number=0, blocks=blocks)


def _config_value(config: object, *names: str, default: int = 0) -> int:
    """Return the first of these settings that is set (the maximum of a list), or `default`."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            return max(value) if isinstance(value, list | tuple) else int(value)
    return default


def _compute_shape(module: "nn.Module", base: "PreTrainedModel", parameters: int) -> Shape:
    config = base.config.get_text_config()
    hidden = _config_value(config, "hidden_size", "d_model", default=1)
    heads = _config_value(config, "num_attention_heads", default=1)
    head_dim = _config_value(config, "head_dim", default=hidden // heads)
    key_heads = _config_value(config, "num_key_value_heads", default=heads)
    kv_width = key_heads * head_dim
    num_bytes, trained, adapters = Counter[bool](), Counter[bool](), 0
    for name, param in module.named_parameters():
        in_block = re.search(r"\.\d+\.", name) is not None
        num_bytes[in_block] += param.nbytes
        trained[in_block] += param.numel() * param.requires_grad
        adapters += param.numel() * (".lora_" in name)
    head = base.get_output_embeddings()
    itemsize = base.dtype.itemsize
    return Shape(
        layers=_config_value(config, "num_hidden_layers", "n_layers", default=1),
        hidden=hidden,
        vocabulary=config.vocab_size,
        key_heads=key_heads,
        kv_width=kv_width,
        saved_elements=_saved_elements(
            config, heads * head_dim, kv_width, itemsize, norms_are_trained=not adapters
        ),
        itemsize=itemsize,
        block_bytes=num_bytes[True],
        root_bytes=num_bytes[False],
        block_trained=trained[True],
        root_trained=trained[False],
        merged_bytes=itemsize * (parameters - adapters),
        context=_config_value(config, "max_position_embeddings", default=2**20),
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        head_is_trained=head is not None and any(p.requires_grad for p in head.parameters()),
    )


def _saved_elements(
    config: object, queries: int, keys: int, itemsize: int, *, norms_are_trained: bool
) -> int:
    """Count the values per token that a block saves: inputs of norms, matrices and attention.

    Rotary embeddings double queries, keys and values. A gated MLP saves four vectors of its width,
    an MLP with ReLU one, with `gelu_new` five, and any other two. RMSNorm saves an fp32 copy, and
    the normalized input unless its weight is frozen, as it is with adapters.
    """
    hidden = _config_value(config, "hidden_size", "d_model", default=1)
    mlp_names = ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")
    mlp_width = _config_value(config, *mlp_names, default=4 * hidden)
    mlp_width *= _config_value(config, "num_experts_per_tok", default=1)
    activation = str(
        getattr(config, "hidden_act", None) or getattr(config, "activation_function", "")
    )
    has_rms_norm = getattr(config, "rms_norm_eps", None) is not None
    has_rotary = has_rms_norm or getattr(config, "rope_parameters", None) is not None
    copies = (2 if itemsize == 4 else 3) + norms_are_trained if has_rms_norm else 2
    norms = 2 * hidden * copies
    attention = (queries + 2 * keys) * (2 if has_rotary else 1) + queries
    vectors = 4 if has_rms_norm else 1 if activation == "relu" else 5 if "new" in activation else 2
    return norms + attention + vectors * mlp_width


def build_models(
    workload: Workload, origins: Mapping[str, str], *, has_gpu: bool
) -> tuple[list[CountedModel], list[str]]:
    """Build the models that a step loads, in order; also return a sentence for each unknown model.

    `origins` holds the initial model of each earlier step that has yet to run, by output directory.
    With `has_gpu`, `auto` precision is bf16.
    """
    models: list[CountedModel] = []
    unknown: list[str] = []
    for use in workload.models:
        if use.settings.path is None:
            continue
        path = str(use.settings.path)
        precision: Precision = "bf16" if has_gpu else "fp32"
        precision = precision if use.settings.precision == "auto" else use.settings.precision
        try:
            settings = replace(use.settings, path=_find_config(path, origins), precision=precision)
            common = {item.name: getattr(settings, item.name) for item in fields(FrozenModelConfig)}
            is_trained = isinstance(settings, TrainedModelConfig)
            module = _build_on_meta(
                FrozenModelConfig(**common),
                settings.lora if isinstance(settings, TrainedModelConfig) else None,
                is_trained=is_trained,
                scores=use.scores,
            )
            models.append(CountedModel(use, path, settings, module))
        except ModelError:
            unknown.append(
                f"{use.role} {path} is not counted: it has not been downloaded, or its"
                " configuration can't be read"
            )
    return models, unknown


@functools.lru_cache(maxsize=16)
def _build_on_meta(
    settings: FrozenModelConfig, lora: LoraConfig | None, *, is_trained: bool, scores: bool
) -> "nn.Module":
    import torch

    from pipeline.models.hf.meta import load_on_meta

    if is_trained:
        settings = TrainedModelConfig(**vars(settings), lora=lora)
    task = "classifier" if scores else "causal"
    return load_on_meta(settings, task=task, device=torch.device("cpu"))


def _find_config(path: str, origins: Mapping[str, str]) -> str:
    """Find the location of the model's configuration, or its name in `KNOWN_CONFIGS`."""
    if path == EMBEDDED or (Path(path).expanduser() / "config.json").is_file():
        return path
    if path in origins:
        return _find_config(origins[path], origins)
    cached = cached_file(path, "config.json")
    if cached is None and path not in KNOWN_CONFIGS:
        raise ModelError(f"the configuration of {path} is not on this machine")
    return path if cached is None else str(Path(cached).parent)
