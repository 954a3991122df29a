"""The harness with this project's generation: `python -m evaluation.harness run ...`.

The model is called `rlhf`: `run --model rlhf --model_args path=DIR --tasks TASK ...`; all other
words are those of `lm_eval`, which `pip install "rlhf-pipeline[harness]"` brings.
"""

import importlib.util
import runpy
import sys
from collections.abc import Sequence

from pipeline.cli.options import run_main
from pipeline.system.errors import ConfigError


def main(argv: Sequence[str]) -> None:
    """Run `lm_eval` with these words, which knows the model `rlhf`.

    Raises:
        ConfigError: it is not installed.
    """
    if "lm_eval" not in sys.modules and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError('the package lm_eval is missing: pip install "rlhf-pipeline[harness]"')

    # The harness looks for models among those that are registered, in no entry points.
    import evaluation.harness.model  # noqa: F401

    sys.argv = ["lm_eval", *argv]
    runpy.run_module("lm_eval", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_main(main)
