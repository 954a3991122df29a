"""What steps and models are called in the report, and its figures in words."""

from collections.abc import Sequence

from pipeline.report.results import Results

BASE = "base"
"""The model before the first step."""

TITLES = {
    BASE: "Base",
    "pretrain": "Continued pre-training",
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dr_grpo": "Dr. GRPO",
    "reinforce_pp": "REINFORCE++",
    "cdpo": "Conservative DPO",
    "rdpo": "Robust DPO",
    "ldpo": "Length-normalized DPO",
    "hinge": "Hinge loss",
    "simpo": "SimPO",
}


def title(name: str, results: Results) -> str:
    """What a step or model is called: by its method, else its directory; `step3_ppo` is PPO."""
    step = results.steps.get(name)
    short = step.method if step else name.split("_", 1)[-1]
    return TITLES.get(short, short.replace("_", " ").upper())


def points(change: float) -> str:
    """A change of a share, in percentage points with its sign."""
    return f"{100 * change:+z.1f}".replace("-", "\u2212")


def percent(share: float) -> str:
    """0.844 as `84.4 %`."""
    return f"{100 * share:.1f}".removesuffix(".0") + "\u202f%"


def score(value: float) -> str:
    """A reward-model score, with its sign."""
    return f"{value:+z.2f}".replace("-", "\u2212")


def plain(value: float) -> str:
    """A figure with two decimals, or none where it is large."""
    return f"{value:z,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def nats(value: float) -> str:
    """A figure in nats."""
    return f"{value:z.2f} nats"


def tokens(value: float) -> str:
    """A mean number of tokens."""
    return f"{value:.1f} tokens"


def listed(names: Sequence[str]) -> str:
    """`A`, `A and B`, `A, B and C`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
