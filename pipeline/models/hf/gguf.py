"""GGUF files as models: Hugging Face directories with dequantized weights."""

import functools
import hashlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from pipeline.cli.options import remark
from pipeline.system.errors import ConfigError, ModelError, first_words


@functools.cache
def as_directory(path: str) -> str:
    """`path`, or for a GGUF file a cached directory with its model.

    The directory is created at the first call, with weights in fp32, equal to those of the file,
    and its tokenizer, special tokens, chat template and stop ids.

    Raises:
        ModelError: there is no such file, or `transformers` can't read it.
        ConfigError: the package `gguf` is missing.
    """
    file = Path(path).expanduser()
    if file.suffix != ".gguf" or file.is_dir():
        return path
    if not file.is_file():
        raise ModelError(f"no such model: the file {file} does not exist")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f'{file} needs the package gguf, which is missing: pip install "rlhf-pipeline[export]"'
        )
    from huggingface_hub import constants

    status = file.stat()
    identity = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    directory = Path(constants.HF_HOME) / "gguf" / name
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            _write(file, Path(scratch))
            try:
                (Path(scratch) / "model").rename(directory)
            except OSError:
                if not directory.is_dir():  # unless another process created it first
                    raise
    remark(f"{file}: dequantized the GGUF weights to fp32, in {directory}")
    return str(directory)


def _write(file: Path, scratch: Path) -> None:
    """Write the model into `scratch/model`."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    from pipeline.models.hf.gguf_vocabulary import ROPE_FACTORS, read_tokenizer

    (scratch / file.name).symlink_to(file.resolve())  # isolated from other files in its directory
    try:
        reader = GGUFReader(file)
        tokenizer, stops = read_tokenizer(reader)
        model: Any = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=file.name, dtype=torch.float32
        )
    except Exception as error:  # transformers and gguf may raise anything
        raise ModelError(f"{file} can't be loaded: {first_words(error)}") from error
    scaled = any(name.endswith(".rope.scaling.type") for name in reader.fields)
    scaled |= any(tensor.name == ROPE_FACTORS for tensor in reader.tensors)
    rope = model.config.rope_parameters if scaled else {}
    kinds = [rope] if "rope_type" in rope else rope.values()  # some have one per layer type
    if scaled and all(kind["rope_type"] == "default" for kind in kinds):
        raise ModelError(
            f"{file} has RoPE scaling, which transformers does not read from GGUF files; use the"
            " model's directory"
        )
    model.generation_config.eos_token_id = list(stops) or None
    model.hf_quantizer = None  # the weights are no longer quantized
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(scratch / "model")
    tokenizer.save_pretrained(scratch / "model")
