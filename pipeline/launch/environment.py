"""What other machines see of this one's environment: names on a list, and a file of more.

Values go through pipes and SLURM's own environment, never on a command line, which every user of a
machine can read.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import ConfigError

PASSED_ON = re.compile(
    r"(NCCL|GLOO|UCX|FI|OMP|MKL|KMP|TORCH|PYTORCH|HF|TRANSFORMERS|TOKENIZERS|WANDB)_\w+"
    r"|PYTHON(?!PATH)\w+|CUDA_(?!VISIBLE_DEVICES)\w+|CUBLAS_WORKSPACE_CONFIG"
    r"|(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy|RLHF_(PLANNED|THREADS)"
)
"""Of libraries that training uses. Which devices and paths a machine has is its own affair."""

PLANNED = "RLHF_PLANNED"
"""Tells a step that `train.py` has looked whether it fits."""

NAME = re.compile(r"[A-Za-z_]\w*")


def passed_on(environment: Mapping[str, str], env_file: Path | None) -> dict[str, str]:
    """What processes on another machine see beside that machine's own environment.

    Raises:
        ConfigError: the file can't be read.
    """
    listed = {name: value for name, value in environment.items() if PASSED_ON.fullmatch(name)}
    return {**listed, **read_env_file(env_file)}


def read_env_file(path: Path | None) -> dict[str, str]:
    """The variables of a file of lines NAME=VALUE; # begins a comment.

    Without a file that of DS_ENV_FILE, or ~/.deepspeed_env if there is one, as with DeepSpeed.

    Raises:
        ConfigError: the file or a line of it can't be used; the sentence begins with its place.
    """
    if path is None:
        usual = Path(os.environ.get("DS_ENV_FILE", "~/.deepspeed_env")).expanduser()
        if not usual.is_file():
            return {}
        path = usual
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--env-file {path} can't be read: {error}") from None
    variables: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or not NAME.fullmatch(name):
            # The line may hold a secret: it is not shown.
            raise ConfigError(f"{path}:{number}: a line is NAME=VALUE, without blanks around =")
        variables[name] = value.strip("\"'")
    return variables
