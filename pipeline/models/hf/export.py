"""Writes models as Hugging Face directories that plain `transformers` can load."""

import json
import logging
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from pipeline.engine.sharding.tensor_parallel import get_shard
from pipeline.files.durable import replace_durably, sync, sync_tree
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.models.adapters.lora import merged_weights, suppress_peft_warnings
from pipeline.models.adapters.quantized import quantized_layers
from pipeline.models.forward.forward import base_model
from pipeline.models.hf.directory import is_sequence_classifier
from pipeline.models.hf.padding import add_padding_row, with_padding_token
from pipeline.parallel.device import local_device
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from pipeline.parallel.transfer import receive_tensors, send_tensors
from pipeline.system.faults import fault_point

SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

MAX_SHARD_BYTES = 5_000_000_000
"""Maximum bytes per file, unless one tensor is larger."""

NamedTensors = Iterable[tuple[str, Tensor]]


def can_stream(model: PreTrainedModel) -> bool:
    """Return whether each tensor in a family's files is computed from a single parameter."""
    return not any(
        isinstance(step, WeightConverter) and len(step.target_patterns) > 1
        for step in get_model_conversion_mapping(model, add_legacy=False)
    )


def as_saved(model: PreTrainedModel, named: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with the names and shapes that `save_pretrained` writes.

    In some families, names in files differ from those in the model, or one parameter contains the
    tensors that the files store per expert. `can_stream` must be true for the family.
    """
    for name, tensor in named:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def stream_export(
    named: NamedTensors, directory: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write full tensors as `model.safetensors`, or as shards and their index.

    At most one shard's tensors are in memory, as copies on the CPU, besides the tensor that `named`
    yields, which may be freed or overwritten in the next iteration. The directory's weights are
    replaced once the new weights are on disk. If the process is killed or power fails, the
    directory contains the old weights, the new weights or none, but never a mixture.

    Raises:
        ValueError: a name was passed twice.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
        shards = _Shards(Path(scratch))
        for name, tensor in named:
            if shards.pending_bytes and shards.pending_bytes + tensor.nbytes > max_shard_bytes:
                shards.write()
            shards.add(name, tensor)
            del tensor  # let the caller free it before making the next
        shards.write()
        fault_point("export.before_replace")
        _replace_files(shards, directory)


class _Shards:
    """Files of tensors, numbered in the order in which they are written."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.files: list[Path] = []
        self.shard_by_name: dict[str, int] = {}
        self.pending_bytes = self.total_size = self.total_parameters = 0
        self._pending: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the CPU, to be written in the next file."""
        if name in self.shard_by_name:
            raise ValueError(f"{name} was passed twice")
        self.shard_by_name[name] = len(self.files)
        self.pending_bytes += tensor.nbytes
        self.total_size += tensor.nbytes
        self.total_parameters += tensor.numel()
        self._pending[name] = tensor.detach().to(
            "cpu", copy=True, memory_format=torch.contiguous_format
        )

    def write(self) -> None:
        """Write the tensors added since the last call."""
        fault_point("export.before_shard")
        file = self.scratch / f"{len(self.files)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        self.files.append(file)
        self._pending, self.pending_bytes = {}, 0

    def index(self, names: list[str]) -> str:
        """Return the index of the shards; `names` are the final names of their files."""
        totals = {"total_parameters": self.total_parameters, "total_size": self.total_size}
        weight_map = {name: names[shard] for name, shard in sorted(self.shard_by_name.items())}
        return json.dumps({"metadata": totals, "weight_map": weight_map}, indent=2) + "\n"


def _replace_files(shards: _Shards, directory: Path) -> None:
    """Move the files to their final names, and remove the files that they replace.

    If both a single file and an index exist, the file takes precedence, so it is removed last. An
    index is removed before its shards change.
    """
    single, index = directory / SINGLE, directory / INDEX
    stale = {path for path in directory.iterdir() if SHARD.fullmatch(path.name)}
    count = len(shards.files)
    sync_tree(shards.scratch)
    if count == 1:
        shards.files[0].replace(single)
        sync(directory)
        index.unlink(missing_ok=True)
    else:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        index.unlink(missing_ok=True)
        sync(directory)
        for file, name in zip(shards.files, names, strict=True):
            file.replace(directory / name)
            stale.discard(directory / name)
        sync(directory)
        replace_durably(index, shards.index(names).encode(), temporary=shards.scratch / INDEX)
        single.unlink(missing_ok=True)
    for path in stale:
        path.unlink()
    sync(directory)


logger = logging.getLogger(__name__)

ADAPTER_DIR = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""Prefix of the parameter names in a peft model."""


@runtime_checkable
class GathersUnits(Protocol):
    """Gathers a model's parameters one unit at a time."""

    def iter_gathered_units(self) -> Iterator[Collection[nn.Parameter]]:
        """Yield gathered parameters, valid until the next iteration; each is yielded once."""
        ...


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    weights: GathersUnits | None = None,
) -> None:
    """Write config, safetensors and tokenizer to `directory`; each file is replaced atomically.

    When the call returns, the files are on disk, with this user's default permissions.

    With LoRA, the directory contains the merged model and, in `adapter/`, peft's adapter. The
    trained model is not modified. All processes must call this: the main process writes, and none
    returns before the files exist. `weights`, such as an engine, gathers parameters one unit at a
    time; without it, all parameters must be in place.
    """
    plain, mesh = base_model(model), current_mesh()
    named = named_weights(plain, weights)
    adapter: dict[str, Tensor] = {}
    unsharder = _Unsharder(plain, mesh.tensor)
    if is_sequence_classifier([type(plain).__name__]):
        tokenizer = with_padding_token(tokenizer)
    exported = _exported_weights(model, named, adapter, unsharder, tokenizer)
    if mesh.is_main:
        for stage in range(1, mesh.stages.size):
            device = local_device()
            exported = chain(exported, receive_tensors(mesh.stages, device, from_stage=stage))
            exported = _split_off_adapter(exported, adapter)
        _write_directory(model, exported, adapter, tokenizer, directory)
        if isinstance(model, PeftModel) and quantized_layers(model):
            logger.info(
                "%s contains the quantized base merged with its adapter; applying %s/ to the"
                " original weights gives a different model",
                directory,
                directory / ADAPTER_DIR,
            )
    elif mesh.data.rank == 0 and mesh.tensor.rank == 0:  # the first process of another stage
        send_tensors(chain(exported, adapter.items()), mesh.stages, to=0)  # fills adapter
    else:  # join the collectives of the other processes
        for _ in exported if mesh.data.rank == 0 else named:
            pass
    mesh.world.barrier()


def set_stop_tokens(model: nn.Module, stop_ids: Sequence[int]) -> None:
    """Make plain `generate` stop where the chat format ends a turn."""
    generation = base_model(model).generation_config
    if generation is not None:
        generation.eos_token_id = list(stop_ids)


@torch.no_grad()
def named_weights(
    model: nn.Module, weights: GathersUnits | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the state dict of `model`; each tensor is complete until the next is requested.

    `weights` may be the engine of the model or of a larger model around it; all processes must
    iterate together. All weights of a unit are in place while one of them is yielded.
    """
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if weights is not None:
        names: dict[Tensor, list[str]] = {}
        for name, tensor in state.items():
            names.setdefault(tensor, []).append(name)
        for params in weights.iter_gathered_units():
            for param in params:
                for name in names.get(param, ()):
                    yield name, state.pop(name).detach()
    for name, tensor in state.items():
        yield name, tensor.detach()


class _Unsharder:
    """Joins tensor-parallel shards of a model's layers into full tensors."""

    def __init__(self, plain: PreTrainedModel, group: Group) -> None:
        # Only the processes of the model's first copy join its shards.
        self._group = group.untracked
        state: dict[str, Tensor] = plain.state_dict(keep_vars=True)
        self._parts = {name: get_shard(tensor) for name, tensor in state.items()}

    def unshard(self, name: str, tensor: Tensor) -> Tensor:
        """Return the full tensor of this name; all processes of the group must call this."""
        part = self._parts.get(name)
        if part is None:
            return tensor
        return part.join(self._group.all_gather(tensor, label="weights for an export"))


def _exported_weights(
    model: nn.Module,
    weights: NamedTensors,
    adapter: dict[str, Tensor],
    unsharder: _Unsharder,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights for the plain model's files; add adapter weights to `adapter`."""
    plain = base_model(model)
    weights = _plain_weights(plain, weights, adapter, unsharder)
    unsaved = _get_unsaved_names(plain)
    kept = ((name, tensor) for name, tensor in weights if name not in unsaved)
    if is_sequence_classifier([type(plain).__name__]):
        kept = add_padding_row(tokenizer, plain, kept)
    yield from as_saved(plain, kept) if can_stream(plain) else kept


def _split_off_adapter(
    weights: NamedTensors, adapter: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights except an adapter's weights, which are added to `adapter`."""
    for name, tensor in weights:
        if name.startswith(ADAPTER_PREFIX):
            adapter[name] = tensor.to("cpu", copy=True)
        else:
            yield name, tensor


def _write_directory(
    model: nn.Module,
    weights: NamedTensors,
    adapter: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".writing-") as scratch:
        staging = Path(scratch)
        plain = base_model(model)
        if can_stream(plain):
            stream_export(weights, directory)
            rest: dict[str, Tensor] = {}
        else:
            rest = {name: tensor.to("cpu", copy=True) for name, tensor in weights}
        with _override_config(plain, tokenizer, tied=not unties_layers(plain, adapter)):
            plain.save_pretrained(staging, state_dict=rest)
        if plain.can_generate():  # transformers would not save settings that it ignores
            file = staging / GENERATION_CONFIG_NAME
            plain.generation_config.to_json_file(file, keys_to_pop=["compile_config"])
        tokenizer.save_pretrained(staging)
        if isinstance(model, PeftModel):
            with suppress_peft_warnings():
                model.save_pretrained(str(staging / ADAPTER_DIR), state_dict=adapter)
            if current_mesh().model_parallel.size > 1:  # peft wrote only this process's part
                file = staging / ADAPTER_DIR / ADAPTER_FILE
                infix = re.compile(r"\.(modules_to_save\.)?default\.")
                tensors = {infix.sub(".", name): tensor for name, tensor in adapter.items()}
                save_file(tensors, file, metadata={"format": "pt"})
        _move_staged_files(staging, directory)


@contextmanager
def _override_config(
    plain: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, tied: bool
) -> Iterator[None]:
    """Set the saved configuration's padding token, vocabulary size and tying in a `with` block.

    In the block, the generation settings have their default values.
    """
    generation = getattr(plain, "generation_config", None)
    if generation is not None:
        plain.generation_config = GenerationConfig()
    text_config = plain.config.get_text_config()
    changed = {"pad_token_id": tokenizer.pad_token_id}
    if is_sequence_classifier([type(plain).__name__]):
        changed["vocab_size"] = max(text_config.vocab_size, tokenizer.pad_token_id + 1)
    elif text_config.pad_token_id is not None:
        changed = {}
    if not tied:
        changed["tie_word_embeddings"] = False
    original = {name: getattr(text_config, name) for name in changed}
    text_config.update(changed)
    try:
        yield
    finally:
        text_config.update(original)
        if generation is not None:
            plain.generation_config = generation


def unties_layers(plain: PreTrainedModel, adapter: Collection[str]) -> bool:
    """Return whether an adapter changes one of two tied layers, such as the output layer."""
    names = chain(*plain.all_tied_weights_keys.items())
    tied = {name.rpartition(".")[0] for name in names}
    changed = (name.removeprefix(ADAPTER_PREFIX) for name in adapter)
    return any(name.startswith(f"{module}.") for name in changed for module in tied)


def _move_staged_files(staging: Path, directory: Path) -> None:
    """Move staged files into a model's directory once they are on disk."""
    sync_tree(staging)
    for path in sorted(staging.iterdir()):
        target = directory / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    sync(directory)


def _plain_weights(
    plain: PreTrainedModel, weights: NamedTensors, adapter: dict[str, Tensor], unsharder: _Unsharder
) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain model's weights, with adapters merged into copies, never into the base.

    The adapter's tensors are added to `adapter`, under their names in the peft model.
    """
    embeddings = (plain.get_input_embeddings(), plain.get_output_embeddings())
    adapted = {
        f"{name}.base_layer"
        for name, module in plain.named_modules()
        if isinstance(module, LoraLayer) and module in embeddings
    }

    def iter_weights() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            is_adapter = ".lora_" in name or ".modules_to_save." in name
            # peft saves adapted embedding and output layers in full.
            if is_adapter or name.rpartition(".")[0] in adapted:
                full = unsharder.unshard(name, weight)
                adapter[ADAPTER_PREFIX + name] = full.to("cpu", copy=True)
            if ".original_module." not in name:
                yield name, weight

    for name, plain_name, weight in merged_weights(plain, iter_weights()):
        exported = plain_name.replace(".modules_to_save.default.", ".")
        yield exported, unsharder.unshard(name, weight)


def _get_unsaved_names(plain: PreTrainedModel) -> set[str]:
    """Return the names of duplicates of tied tensors, and of tensors that are never saved."""
    state = plain.state_dict(keep_vars=True)
    tied = {
        name
        for name, source in plain.all_tied_weights_keys.items()
        if name in state and source in state and state[name] is state[source]
    }
    return tied | set(plain._keys_to_ignore_on_save or ())  # noqa: SLF001
