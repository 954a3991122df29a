"""Models whose weights stay in their files until the engine of each process reads its pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from pipeline.engine.stored import ReadElements, StoredParameter, copy_elements, stored_like
from pipeline.errors import ModelError
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.files.weight_files import WeightFiles
from pipeline.models.finite import is_finite, sentence
from pipeline.models.stream import find_weights, meta_model


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
