"""Location of the code, in a checkout or an installed package, and names of its commands."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Directory of `pipeline/`, the steps and `configs/`; on the `PYTHONPATH` of child processes."""

IS_INSTALLED = ROOT.name == "rlhf_pipeline"
"""Whether the code is installed from a wheel, inside one package (`rlhf_pipeline`)."""

OWN_PACKAGES = (
    *("pipeline", "inference", "rewards", "evaluation"),
    *("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference"),
)

TRAIN = "rlhf" if IS_INSTALLED else "python train.py"
CHAT = "rlhf-chat" if IS_INSTALLED else "python chat.py"
MODULE = "python -m rlhf_pipeline" if IS_INSTALLED else "python -m"


def find_preset(path: Path) -> Path:
    """Return the settings file at `path`, or the built-in preset with that name if there is none.

    Thus `--config configs/opt-1.3b.yaml` and `opt-1.3b.yaml` work in any directory.
    """
    if path.is_absolute() or path.exists():
        return path
    for preset in (ROOT / path, ROOT / "configs" / path):
        if preset.is_file() and (ROOT / "configs") in preset.parents:
            return preset
    return path
