"""What the extra `export` installs."""

import importlib.util
from collections.abc import Sequence

from pipeline.errors import ConfigError


def require_packages(names: Sequence[str]) -> None:
    """Raise ConfigError where a package of the extra `export` is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'the package {missing[0]} is missing: pip install "rlhf-pipeline[export]"'
        )


def has_llama_cpp() -> bool:
    """Whether llama.cpp's Python package is here to read GGUF files."""
    return importlib.util.find_spec("llama_cpp") is not None
