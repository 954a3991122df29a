"""Models without weights, and where the files hold what each of their parameters needs."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pipeline.errors import ModelError
from pipeline.files.weight_files import WeightFiles

ModelT = TypeVar("ModelT", bound=PreTrainedModel)

COMPARED_AT_ONCE = 2**22
"""Elements; tied tensors that are stored twice are compared piece by piece."""


def meta_model(build: Callable[[], ModelT]) -> ModelT:
    """What `build` makes of a config, with parameters that have a shape and no memory.

    Buffers, such as the frequencies of rotary embeddings, are computed. Tied parameters are one
    object, and those that a family keeps in fp32 have that number format, as after
    `from_pretrained`.
    """
    with init_empty_weights(include_buffers=False):
        model = build()
    model.tie_weights()  # each got an empty tensor of its own
    kept = model._get_dtype_plan(model.dtype)  # noqa: SLF001  # what from_pretrained asks
    if kept:
        pattern = re.compile("|".join(kept).replace("*", ".*"))
        for name, param in model.named_parameters():
            if pattern.search(name):
                param.data = param.data.float()
    return model


@dataclass(frozen=True)
class StoredWeights:
    """Where files hold a model's parameters and persistent buffers."""

    names: Mapping[str, str]
    """Name in the files by name in the model; the names of a tied parameter have the same one."""

    missing: tuple[str, ...]
    """Names in the model that the files have nothing for, such as a new head's."""

    needs_conversion: bool
    """True where the files aren't taken as they are: tensors are merged, split or quantized, or two
    tensors are stored for one tied parameter. `from_pretrained` knows how to load those."""


def find_weights(model: PreTrainedModel, files: WeightFiles) -> StoredWeights:
    """Match the model's names with the files', as `from_pretrained` does.

    A base model's files fit a model with a head, and a head's files a base model or another head;
    names that a family had in earlier versions are known.

    Raises:
        ModelError: a stored tensor has another shape than the model's.
    """
    own = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    converters = [step for step in conversions if isinstance(step, WeightConverter)]
    prefix = model.base_model_prefix
    needs_conversion = getattr(model.config, "quantization_config", None) is not None

    names: dict[str, str] = {}
    for stored in sorted(files.names(), key=dot_natural_key):
        name, converter = rename_source_key(stored, renamings, converters, prefix, own)
        if name not in own and stored in own:  # it has its present name already
            name, converter = rename_source_key(stored, [], [], prefix, own)
        if name in own:
            needs_conversion |= converter is not None
            names.setdefault(name, stored)

    for tied in _tied(model):
        present = [names[name] for name in tied if name in names]
        needs_conversion = needs_conversion or not all(
            _equal(files, present[0], other) for other in present[1:]
        )
        names |= {name: names.get(name, present[0]) for name in tied if present}

    if not needs_conversion:
        _require_shapes({stored: own[name] for name, stored in names.items()}, files)
    spared = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]  # noqa: SLF001
    missing = sorted(
        name
        for name in own.keys() - names.keys()
        if not any(pattern.search(name) for pattern in spared)
    )
    return StoredWeights(names, tuple(missing), needs_conversion)


def _require_shapes(own: Mapping[str, Tensor], files: WeightFiles) -> None:
    wrong = sorted(name for name, param in own.items() if files.shape(name) != tuple(param.shape))
    for name in wrong[:1]:
        others = f", and {len(wrong) - 1} more that differ" if len(wrong) > 1 else ""
        raise ModelError(
            f"{files.path} holds {name} of shape {files.shape(name)}, but the model of its"
            f" config.json has it of shape {tuple(own[name].shape)}{others}; config.json and"
            " weights are not of one model"
        )


def _tied(model: PreTrainedModel) -> list[Sequence[str]]:
    """The names of each parameter that has several."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _equal(files: WeightFiles, one: str, other: str) -> bool:
    """Whether two stored tensors hold the same numbers."""
    shape = files.shape(one)
    if one == other or files.shape(other) != shape:
        return one == other
    numel = torch.Size(shape).numel()
    pieces = [
        (start, min(start + COMPARED_AT_ONCE, numel)) for start in range(0, numel, COMPARED_AT_ONCE)
    ]
    return all(
        torch.equal(
            files.slice(one, *piece, dtype=torch.float64),
            files.slice(other, *piece, dtype=torch.float64),
        )
        for piece in pieces
    )
