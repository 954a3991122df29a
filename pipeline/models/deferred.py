"""Models whose weights stay in their files until the engine of each process reads its pieces."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from jaxtyping import Shaped
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from pipeline.engine.state import read_part
from pipeline.engine.stored import ReadElements, StoredParameter, copy_elements, stored_like
from pipeline.engine.tensor_parts import Part, mark_part
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.files.weight_files import WeightFiles
from pipeline.system.errors import ModelError


def require_finite(model: nn.Module, path: str) -> None:
    """Refuse a model whose parameters hold NaN or infinity; what is still in files is not read.

    One pass over the weights, on the device where they are.

    Raises:
        ModelError: the first such parameter, and how many there are.
    """
    broken = [
        name
        for name, param in model.named_parameters()
        if not isinstance(param, StoredParameter) and not is_finite(param)
    ]
    if broken:
        dtype = next(model.parameters()).dtype
        raise ModelError(f"{path}: {sentence(broken[0], more=len(broken) - 1, dtype=dtype)}")


@torch.no_grad()
def is_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, without a tensor of its size beside it."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()  # both are NaN where any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def sentence(name: str, *, dtype: torch.dtype, more: int = 0) -> str:
    """What is wrong with a parameter that is not finite, and what to do."""
    others = f" and {more} more weights hold" if more else " holds"
    narrow = ", or has numbers too large for fp16: try precision bf16 or fp32"
    return (
        f"{name}{others} NaN or infinity; the model is damaged or its training diverged: take an"
        f" earlier one, or download it again{narrow if dtype == torch.float16 else ''}"
    )


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


class NotDeferrableError(Exception):
    """The model can be loaded by `from_pretrained` only; the message says why."""


def deferred_model(
    auto: Any,  # noqa: ANN401  # one of the Auto classes, which have no common base
    path: str,
    settings: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, set[str]]:
    """What `auto.from_pretrained` makes of `path`, with parameters that read from its files.

    Buffers are in place. Parameters that the files have nothing for are zeros on the CPU, for the
    caller to draw; their names are the second value.

    Raises:
        NotDeferrableError: the files aren't safetensors that can be taken as they are.
        ModelError: they are damaged or don't fit the settings.
    """
    directory = _weights_of(path)
    files = WeightFiles(directory)
    settings.name_or_path = path
    model: PreTrainedModel = meta_model(
        lambda: auto.from_config(settings, dtype=dtype, trust_remote_code=trust_remote_code)
    )
    weights = find_weights(model, files)
    if weights.needs_conversion:
        raise NotDeferrableError("its files hold other tensors than the model has")

    def read(name: str, dtype: torch.dtype) -> ReadElements:
        return partial(_read_finite, files, weights.names[name], dtype=dtype)

    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module, leaf, param in places(model):
        if param not in made:
            made[param] = (
                stored_like(param, read(name, param.dtype), device)
                if name in weights.names
                else nn.Parameter(torch.zeros_like(param, device="cpu"), param.requires_grad)
            )
        setattr(module, leaf, made[param])  # all names of a tied parameter get the same one
    for name, buffer in model.named_buffers():
        if name in weights.names:  # a mask may be infinite
            piece = files.slice(weights.names[name], 0, buffer.numel(), dtype=buffer.dtype)
            buffer.copy_(piece.view(buffer.shape))
    if model.can_generate():
        model.generation_config = _generation_config(path)
    return model.eval(), set(weights.missing)


def _read_finite(
    files: WeightFiles, name: str, start: int, stop: int, *, dtype: torch.dtype
) -> Shaped[Tensor, " n"]:
    """Elements `start` to `stop` of a stored tensor.

    Raises:
        ModelError: they can't be read, or are not finite.
    """
    piece = files.slice(name, start, stop, dtype=dtype)
    if not is_finite(piece):
        raise ModelError(f"{files.path}: {sentence(name, dtype=dtype)}")
    return piece


def _weights_of(path: str) -> Path:
    """The directory of the model's safetensors; those of a Hub model are downloaded.

    Raises:
        NotDeferrableError: it has none, or more than these make the model.
    """
    local = Path(path)
    if local.is_dir():
        if (local / "adapter_config.json").is_file():
            raise NotDeferrableError("it holds an adapter")
        if (local / SINGLE).is_file() or (local / INDEX).is_file():
            return local
    else:
        found = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
        single, index = found(SINGLE), None
        if single is not None:
            return Path(single).parent
        index = found(INDEX)
        if index is not None:
            shards, _ = get_checkpoint_shard_files(path, index)
            return Path(shards[0]).parent
    raise NotDeferrableError("it holds no safetensors files")


def places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every place where a module holds a parameter: full name, module, name in it, parameter."""
    for prefix, module in list(model.named_modules()):
        for leaf, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, param


def _generation_config(path: str) -> GenerationConfig:
    """The model's own, else what its config.json says about generation."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(
            path, config_file_name="config.json", _from_model_config=True
        )


@dataclass(frozen=True)
class Grown:
    """A stored tensor that rows were added to."""

    stored: ReadElements
    numel: int
    """Elements of the stored part, which come first."""

    added: Tensor
    """The new rows, flattened."""

    def __call__(self, start: int, stop: int) -> Tensor:
        """Elements `start` to `stop` of both."""
        old = self.stored(min(start, self.numel), min(stop, self.numel))
        new = self.added[max(start - self.numel, 0) : max(stop - self.numel, 0)]
        return torch.cat([old, new])


def stored_parameters(model: nn.Module) -> dict[str, tuple[torch.Size, ReadElements]]:
    """Shape and source of each parameter that is still in a file, by every name it has."""
    return {
        name: (param.shape, param.read)
        for name, param in model.named_parameters(remove_duplicate=False)
        if isinstance(param, StoredParameter)
    }


@torch.no_grad()
def read_stored(model: nn.Module, device: torch.device) -> None:
    """Read, of a model that no engine lays out, the parameters that are still in files."""
    for param in list(model.parameters()):
        if isinstance(param, StoredParameter):
            data = torch.empty(param.shape, dtype=param.dtype, device=device)
            copy_elements(param, 0, data.view(-1))
            param.data = data
            param.settle()


def defer_again(model: nn.Module, before: dict[str, tuple[torch.Size, ReadElements]]) -> None:
    """Keep nothing but the new rows of parameters that have grown since `stored_parameters`."""
    made: dict[nn.Parameter, StoredParameter] = {}
    for name, module, leaf, param in places(model):
        shape, stored = before.get(name, (param.shape, None))
        if param.shape == shape or stored is None:
            continue
        if param not in made:
            added = param.detach()[shape[0] :].to("cpu", copy=True).flatten()
            made[param] = stored_like(param, Grown(stored, shape.numel(), added))
        setattr(module, leaf, made[param])


def replace_by_part(layer: nn.Module, leaf: str, part: Part) -> None:
    """Have a layer's parameter be this process's part of it; one in a file stays there.

    A parameter that is stored flat stays so.
    """
    param = layer.get_parameter(leaf)
    shape = part.own.shape(part.whole)
    if part.stored is not None:
        shape = torch.Size((shape.numel(),))
    if isinstance(param, StoredParameter):
        like = torch.empty(shape, dtype=param.dtype, device="meta")
        read = partial(_read_part_elements, part, param.read, param.dtype)
        own: nn.Parameter = stored_like(like, read, param.device)
    else:
        found = part.own.of(param.detach().view(part.whole))
        found = found.clone(memory_format=torch.contiguous_format).view(shape)
        own = nn.Parameter(found, requires_grad=False)
    own.requires_grad_(param.requires_grad)
    mark_part(own, part)
    setattr(layer, leaf, own)


def _read_part_elements(
    part: Part, whole: ReadElements, dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    """Elements of a part, from where those of the whole are."""
    out = torch.empty(stop - start, dtype=dtype)

    def fill(first: int, values: Tensor) -> None:
        values.copy_(whole(first, first + len(values)))

    read_part(part, start, out, fill)
    return out
