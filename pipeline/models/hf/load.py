"""Loads models and tokenizers from the Hub or a directory, or builds the embedded ones."""

import logging
import pickle
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from pipeline.config import EMBEDDED, FrozenModelConfig, Precision, TrainedModelConfig
from pipeline.demo.model import build_model, build_tokenizer
from pipeline.models.adapters.quantized import quantize_model
from pipeline.models.forward.attention import RAGGED
from pipeline.models.forward.packing import detect_batching
from pipeline.models.hf.directory import (
    check_configuration,
    check_tokenizer,
    check_weights,
    is_sequence_classifier,
    require_language_model,
    require_unquantized,
    untrusted_code_error,
)
from pipeline.parallel.group import SELF_GROUP, Group
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import ModelError, UserError, is_out_of_memory, one_line
from pipeline.system.hub import cached_file, require_reachable
from pipeline.system.installation import TRAIN


@contextmanager
def suppress_transformers_warnings() -> Iterator[None]:
    """Suppress the tables and warnings of `transformers`; this module reports important ones."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


logger = logging.getLogger(__name__)


def weight_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the data type of the weights; `auto` is bf16 on a GPU that supports it, else fp32."""
    if precision == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if has_bf16 else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def model_path(config: FrozenModelConfig) -> str:
    """Return the path of the model.

    Raises:
        ModelError: no path was given.
    """
    if config.path is None:
        raise ModelError("no model path was given; set it, or run the previous step with train.py")
    return config.path


def load_tokenizer(config: FrozenModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; if it has no padding token, use the end-of-sequence token.

    Masks are computed from lengths, so the choice of padding token doesn't matter.
    """
    path = model_path(config)
    if path == EMBEDDED:
        return build_tokenizer()
    local = local_directory(path)
    if local is not None:
        check_configuration(local)
        check_tokenizer(local)
    tokenizer = _load(
        path,
        "tokenizer",
        lambda: AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code),
    )
    if tokenizer.eos_token_id is None and tokenizer.sep_token_id is not None:
        # Encoders such as BERT: [CLS] text [SEP].
        tokenizer.bos_token, tokenizer.eos_token = tokenizer.cls_token, tokenizer.sep_token
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path} has no end-of-sequence token; set eos_token in its"
            " tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    config: FrozenModelConfig, *, device: torch.device, seed: int = 0, defer: bool = False
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode, without dropout; quantize it if configured.

    With `defer` the weights stay on the CPU, for an engine that keeps a shard of them; they are
    memory-mapped if the files have the same data type.
    """
    path = model_path(config)
    if path == EMBEDDED:
        model: PreTrainedModel = build_model(vocab_size=len(build_tokenizer()), seed=seed)
        nn.Module.to(model, dtype=weight_dtype(config.precision, device))
    else:
        settings = _load_settings(path, config)
        require_language_model(path, settings.architectures)
        model, missing = _load_weights(AutoModelForCausalLM, config, settings, device)
        _require_weights(path, missing)
    if not detect_batching(model).causal:
        raise ModelError(
            f"{path} is not a causal language model: the outputs of {model.config.model_type}"
            " depend on later tokens; use another model or, if this one was trained to generate,"
            " set is_decoder to true in its config.json"
        )
    return _prepare(model, config, device, defer=defer)


def load_classifier(
    config: FrozenModelConfig,
    *,
    device: torch.device,
    seed: int = 0,
    defer: bool = False,
    num_labels: int | None = None,
) -> PreTrainedModel:
    """Load a sequence classifier in evaluation mode, without dropout; quantize it if configured.

    A head that the directory lacks, or has for a different number of labels, is drawn from N(0, 1 /
    (d + 1)), where d is the hidden size (Stiennon et al. 2020, appendix B). Without `num_labels`,
    a classifier keeps its labels, and a language model gets one. `defer` is the same as in
    `load_causal_lm`.

    Raises:
        ModelError: the model can't be used, or is frozen and has no score head.
    """
    path = model_path(config)
    if path == EMBEDDED:
        raise ModelError(
            "the embedded model can't be used as a reward model; to train one, run"
            f" `{TRAIN} --step 1 2`"
        )
    settings = _load_settings(path, config)
    is_classifier = is_sequence_classifier(settings.architectures)
    num_stored_labels = int(settings.num_labels or 1) if is_classifier else 1
    num_outputs = num_stored_labels if num_labels is None else num_labels
    is_redrawn = is_classifier and num_outputs != num_stored_labels
    settings.num_labels = num_outputs
    if is_redrawn:
        settings.__dict__.pop("class_values", None)
    model, missing = _load_weights(AutoModelForSequenceClassification, config, settings, device)
    new_weights = {name for name in missing if HEAD.match(name)}
    _require_weights(path, missing - new_weights)
    if new_weights and num_labels is None and not isinstance(config, TrainedModelConfig):
        raise ModelError(
            f"{path} is not a reward model: its files lack {min(new_weights)}; use step 2's output"
        )
    init_layers(model, new_weights, seed=seed)
    if not hasattr(model, "score") and not hasattr(model, "classifier"):
        raise ModelError(
            f"{path}: classifiers of its family ({model.config.model_type}) have an unsupported"
            " kind of head; use a model of another family"
        )
    return _prepare(model, config, device, defer=defer)


def init_layers(model: PreTrainedModel, names: Collection[str], *, seed: int) -> None:
    """Draw the weights in `names` from N(0, 1 / (d + 1)), where d is the layer's input size.

    See Stiennon et al. 2020, appendix B. Biases are set to 0. All processes draw the same weights.
    """
    for name in sorted(names):
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight":
            continue
        head = cast("nn.Linear", model.get_submodule(layer))
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(head.weight.shape, generator=generator)
        with torch.no_grad():
            head.weight.copy_(weight * (head.in_features + 1) ** -0.5)
            if head.bias is not None:
                head.bias.zero_()


HEAD = re.compile(r"(score|classifier|pre_classifier|(\w+\.)?pooler)\.")
"""Pattern of the parameters that a classifier has and a language model lacks."""


def load_for_inference(
    path: str | Path, *, precision: Precision = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer for generation, on this machine's device."""
    config = FrozenModelConfig(path=str(path), precision=precision)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_causal_lm(config, device=device), load_tokenizer(config)


def load_reward(config: FrozenModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a reward model and its tokenizer for scoring on this machine's GPU or CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_classifier(config, device=device), load_tokenizer(config)


def tokens_without_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the tokens that have no row in the model's embeddings."""
    num_rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    return [str(tokenizer.convert_ids_to_tokens(i)) for i in range(num_rows, len(tokenizer))]


def add_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> None:
    """Add embedding rows for the tokenizer's tokens that lack one; no row is ever removed.

    New rows are drawn from `seed`, so they are the same on all processes and in all copies.
    """
    if tokens_without_rows(model, tokenizer):
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # by default, it would initialize all GPUs
            torch.manual_seed(seed)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)


HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")
"""`name` or `owner/name`; anything else can only be a directory."""


def local_directory(path: str) -> Path | None:
    """Return a model's local path, or None if it does not exist and may be a Hub name."""
    local = Path(path).expanduser()
    return None if HUB_NAME.fullmatch(path) and not local.exists() else local


def _load_settings(path: str, config: FrozenModelConfig) -> PreTrainedConfig:
    local = local_directory(path)
    if local is not None:
        check_configuration(local)
        check_weights(local, allow_pickle=config.allow_pickle)
    settings = _load(
        path,
        "config.json",
        lambda: AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code),
    )
    require_unquantized(path, getattr(settings, "quantization_config", None))
    disable_dropout(settings)
    return settings


def disable_dropout(settings: PreTrainedConfig) -> None:
    """Set all dropout rates to 0, under every name that families use."""
    for name, value in list(vars(settings).items()):
        if isinstance(value, PreTrainedConfig):
            disable_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(settings, name, 0.0)


def _load_weights(
    auto: Any,  # noqa: ANN401  # one of the Auto classes, which have no common base
    config: FrozenModelConfig,
    settings: PreTrainedConfig,
    device: torch.device,
) -> tuple[PreTrainedModel, set[str]]:
    """Load the model on the CPU; also return the names of missing parameters and resized heads.

    If the files have the requested data type, weights are memory-mapped, so that all processes
    of a machine share them.
    """
    path, dtype = model_path(config), weight_dtype(config.precision, device)
    model, info = _load(
        path,
        "model",
        lambda: auto.from_pretrained(
            path,
            config=settings,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle else True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        ),
    )
    mismatched = info["mismatched_keys"]
    heads = {name for name, *_ in mismatched if HEAD.match(name)}
    for name, stored, expected in sorted(key for key in mismatched if key[0] not in heads)[:1]:
        raise ModelError(
            f"{path} has {name} of shape {tuple(stored)}, but its config.json implies shape"
            f" {tuple(expected)}; config.json and weights are from different models"
        )
    return model, set(info["missing_keys"]) | heads


def _prepare(
    model: PreTrainedModel, config: FrozenModelConfig, device: torch.device, *, defer: bool
) -> PreTrainedModel:
    """Enable packing if it is exact, quantize a frozen model, and set evaluation mode.

    The model is moved to the device; with `defer`, only its buffers are.
    """
    if detect_batching(model).packed:
        model.set_attn_implementation(RAGGED)
    require_finite(model, model_path(config), current_mesh().world if defer else SELF_GROUP)
    if not isinstance(config, TrainedModelConfig) and config.quantize != "none":
        quantize_model(model.requires_grad_(False), config, device=device)
    if defer:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)  # noqa: SLF001
    else:
        nn.Module.to(model, device=device)
        align_weights(model)
    return model.eval()


def require_finite(model: nn.Module, path: str, processes: Group = SELF_GROUP) -> None:
    """Reject a model with NaN or infinite parameters; each process checks a share of them.

    Raises:
        ModelError: there are such parameters; the message names the first and gives their number.
    """
    named = list(model.named_parameters())[processes.rank :: processes.size]
    local = [name for name, param in named if not _is_finite(param)]
    broken = [name for names in processes.gather_objects(local) for name in names]
    if broken:
        others = f" and {len(broken) - 1} more contain" if len(broken) > 1 else " contains"
        hint = "; if its values are too large for fp16, set precision to bf16 or fp32"
        is_fp16 = next(model.parameters()).dtype == torch.float16
        raise ModelError(
            f"{path}: {broken[0]}{others} NaN or infinity; the model is damaged or its training"
            f" diverged: use an earlier one, or download it again{hint if is_fp16 else ''}"
        )


@torch.no_grad()
def _is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, without a temporary of the tensor's size."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = tensor.aminmax()  # both are NaN if any element is
    return bool(torch.isfinite(low) & torch.isfinite(high))


ALIGNMENT = 64
"""Alignment of PyTorch's CPU memory in bytes."""


def align_weights(model: nn.Module) -> None:
    """Copy memory-mapped weights that are not aligned as the allocator would align them.

    The summation order of matrix products depends on alignment, so a frozen model's results would
    differ in the last digits between ZeRO stage 0 and stage 3, which allocates its weights.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def _require_weights(path: str, missing: Collection[str]) -> None:
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of the model's weights, such as {min(missing)}; it was"
            " not saved completely, or its config.json is for another architecture"
        )


def _load(path: str, what: str, load: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Call `load`, which loads `what`; raise a ModelError if it fails, unless memory ran out."""
    if local_directory(path) is None and cached_file(path, "config.json") is None:
        message = f"no such model: {path} is neither a local model directory nor in the Hub's cache"
        require_reachable(message, ModelError, alternative="a directory")
    try:
        with suppress_transformers_warnings():
            return load()
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} contains a pickle that does more than store tensors, so it is not loaded"
        ) from error
    except Exception as error:  # transformers and tokenizers may raise even a bare Exception
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise ModelError(untrusted_code_error(path)) from error
        if local_directory(path) is None and cached_file(path, "config.json") is None:
            raise ModelError(
                f"no such model: {path} is neither a local model directory nor a reachable Hub"
                f" model ({one_line(error)})"
            ) from error
        raise ModelError(f"the {what} of {path} can't be loaded: {one_line(error)}") from error
