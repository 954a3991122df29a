"""`python -m rlhf_pipeline MODULE [OPTION ...]`: run what `python -m MODULE` runs in a checkout."""

import importlib.util
import runpy
import sys

import rlhf_pipeline

PACKAGES = (
    *("evaluation", "inference", "pipeline", "rewards"),
    *("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference"),
)
USAGE = (
    "usage: python -m rlhf_pipeline MODULE [OPTION ...]\n\n"
    "Runs a module of the package, such as inference.generate, step1_sft.evaluate,\n"
    "pipeline.data.inspect or pipeline.engine.checkpoint.\n"
    "`rlhf` runs the three steps, `rlhf-chat` talks to a model, `rlhf-serve` serves models."
)


def main() -> None:
    """Run the module named on the command line as `__main__`."""
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)  # noqa: T201
        return
    module, *rest = args
    rlhf_pipeline.add_to_path()
    if module.split(".")[0] not in PACKAGES or not _exists(module):
        print(  # noqa: T201
            f"error: rlhf_pipeline has no module {module}; use one that the documentation runs"
            " with `python -m`, such as inference.generate",
            file=sys.stderr,
        )
        raise SystemExit(2)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


main()
