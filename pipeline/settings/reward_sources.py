"""Short forms of where rewards come from: `--reward-function FILE.py:NAME` and `--reward KIND`."""

from collections.abc import Sequence


def reward_sources(functions: Sequence[str], kinds: Sequence[str]) -> list[dict[str, str]]:
    """A list of `rewards` as files of settings have it, each source named for what it is."""
    of_functions = [
        {"name": path.rpartition(":")[2], "kind": "function", "path": path} for path in functions
    ]
    return [*of_functions, *({"name": kind, "kind": kind} for kind in kinds)]
