"""Fast checks of a model directory, before anything heavy is imported.

`check_model_directory` reads file names, JSON files and safetensors headers, but no weights; unless
the model has custom code, neither torch nor transformers is imported. It takes milliseconds for a
model of any size, so a plan can check every model path before the first step.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.files.safetensors_header import INDEX, SINGLE, reject_lfs_pointer, stored_tensors
from pipeline.system.errors import ModelError

ADAPTER = "adapter_config.json"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "*.model",  # SentencePiece
    "*.tiktoken",
    "vocab.*",
    "tokenization_*.py",
)
"""File name patterns; one matching file is enough for a tokenizer."""

JSON_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "generation_config.json",
)
"""Files that must contain a JSON object, if they exist."""

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")
"""Data types that a configuration can name."""

DEQUANTIZED = ("fp8", "mxfp4")
"""Quantized formats that `transformers` can convert to bf16 when it loads a model."""


def check_model_directory(
    path: str | Path,
    *,
    generates: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Check a local model directory, as far as possible without loading the model.

    Other errors appear when the model is loaded: an unknown architecture, tensors whose sizes don't
    match the configuration, or weights that are not finite.

    With `generates`, the directory must hold a language model; `allow_pickle` accepts
    `pytorch_model*.bin`; `trust_remote_code` lets Python code in the directory run.

    Raises:
        ModelError: the directory fails a check; the message names the file and the fix.
    """
    directory = Path(path).expanduser()
    settings = check_configuration(directory)
    if "auto_map" in settings and not trust_remote_code:
        from transformers import CONFIG_MAPPING

        if settings["model_type"] not in CONFIG_MAPPING:
            raise ModelError(untrusted_code_error(directory))
    if generates:
        require_language_model(directory, settings.get("architectures"))
    check_weights(directory, allow_pickle=allow_pickle)
    check_tokenizer(directory)


def is_sequence_classifier(architectures: Iterable[str] | None) -> bool:
    """Return whether these `architectures` of a configuration include a sequence classifier."""
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def require_language_model(path: str | Path, architectures: Iterable[str] | None) -> None:
    """Reject a classifier, such as a reward model, where a language model is required.

    With tied embeddings a classifier has all of a language model's weights: it would load and
    generate nonsense.

    Raises:
        ModelError: the model is a classifier.
    """
    if is_sequence_classifier(architectures):
        raise ModelError(
            f"{path} is a classifier, such as a reward model or critic, and can't generate text;"
            " use a language model, such as step 1's output"
        )


def untrusted_code_error(path: str | Path) -> str:
    """Return the error message for a model with custom code, which is not loaded."""
    return (
        f"{path} contains Python code that loading would execute; review the code, and set"
        " trust_remote_code to true for this model if you trust it"
    )


def check_configuration(directory: Path) -> dict[str, Any]:
    """Return the contents of `config.json`.

    Raises:
        ModelError: there is no valid configuration, or the weights' format is not supported.
    """
    if not directory.exists():
        raise ModelError(f"no such model: the directory {directory} does not exist")
    if not directory.is_dir():
        raise ModelError(
            f"{directory} is a file; a model is a directory with config.json, safetensors and a"
            " tokenizer"
        )
    if not (directory / "config.json").is_file():
        raise ModelError(_missing_configuration_error(directory))
    settings = _read_json(directory / "config.json")
    if not isinstance(settings.get("model_type"), str):
        raise ModelError(
            f"{directory / 'config.json'} has no model_type; restore the model's original"
            " config.json"
        )
    dtype = settings.get("dtype") or settings.get("torch_dtype")
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ModelError(
            f"{directory / 'config.json'} has dtype {dtype}, not one of {', '.join(DTYPES)};"
            " restore the model's original config.json"
        )
    require_unquantized(directory, settings.get("quantization_config"))
    return settings


def require_unquantized(path: str | Path, quantization: Mapping[str, Any] | None) -> None:
    """Reject a model that is stored in a quantized format, unless it is dequantized when loaded.

    Raises:
        ModelError: the model is stored in such a format.
    """
    method = (quantization or {}).get("quant_method")
    if quantization and method not in DEQUANTIZED:
        raise ModelError(
            f"{path} is stored in the quantized format {method}, which is not supported; use the"
            " original model, with quantize nf4 if memory is short"
        )


def check_weights(directory: Path, *, allow_pickle: bool = False) -> None:
    """Check the weights, without reading them.

    Raises:
        ModelError: weights are missing, damaged, a Git LFS pointer, an adapter's, or a pickle that
            is not allowed.
    """
    has_safetensors = any((directory / name).is_file() for name in (SINGLE, INDEX))
    if (directory / ADAPTER).is_file():
        if has_safetensors:  # transformers would load the adapter's base instead
            raise ModelError(
                f"{directory} contains both a model and an adapter, {ADAPTER}; move the adapter to"
                " another directory"
            )
        raise ModelError(_bare_adapter_error(directory))
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if pickled and not has_safetensors:
        for file in pickled:
            reject_lfs_pointer(file)
        if not allow_pickle:
            raise ModelError(
                f"{directory} stores its weights as {pickled[0].name}, a pickle that can run code;"
                " save the model as safetensors (save_pretrained does), or, if you trust its"
                " source, set allow_pickle to true"
            )
    elif not stored_tensors(directory):
        raise ModelError(f"{directory} has no weights: its safetensors files are empty")


def check_tokenizer(directory: Path) -> None:
    """Check the tokenizer's files.

    Raises:
        ModelError: there is no tokenizer, or one of its files is a Git LFS pointer or not JSON.
    """
    files = [file for pattern in TOKENIZER_FILES for file in sorted(directory.glob(pattern))]
    if not any(file.is_file() for file in files):
        raise ModelError(
            f"{directory} has no tokenizer: it has neither tokenizer.json nor tokenizer.model; copy"
            " the original model's, or save the tokenizer there with save_pretrained"
        )
    for file in files:
        reject_lfs_pointer(file)
    for name in JSON_FILES:
        if (directory / name).is_file():
            _read_json(directory / name)


def _read_json(file: Path) -> dict[str, Any]:
    reject_lfs_pointer(file)
    hint = "download it again, or copy it from the original model"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}); {hint}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} is not a JSON object but a {type(content).__name__}; {hint}")
    return content


def _missing_configuration_error(directory: Path) -> str:
    no_model = f"{directory} contains no model"
    if (directory / ADAPTER).is_file():
        return _bare_adapter_error(directory)
    if not any(directory.iterdir()):
        return f"{no_model}: it has no config.json; the directory is empty"
    configs = [*directory.glob("*/config.json"), *directory.glob("*/*/config.json")]
    if models := sorted({config.parent for config in configs}):
        paths = " or ".join(map(str, models[:4]))
        return f"{no_model}: it has no config.json; use the model in {paths}"
    return f"{no_model}: it has no config.json; copy it from the model that the weights are from"


def _bare_adapter_error(directory: Path) -> str:
    message = f"{directory} contains an adapter without its base model"
    if (directory.parent / "config.json").is_file():
        return f"{message}; use the merged model in {directory.parent}"
    base = _read_json(directory / ADAPTER).get("base_model_name_or_path")
    return (
        f"{message}{f', {base}' if base else ''}; merge them with peft's merge_and_unload, save the"
        " result and its tokenizer with save_pretrained, and use that directory"
    )
