"""Bad input ends in a sentence or in PyTorch's hands, whatever the operator."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pipeline.kernels.emulator.emulated import compiler_found
from pipeline.kernels.operators import operators

ROOT = Path(__file__).parents[3]

EXPECTED: dict[str, str] = {
    what: outcome
    for name in operators()
    for what, outcome in import_module(f"tests.pipeline.kernels.{name}.bad_input").EXPECTED.items()
}
"""By operator and what is bad of its input."""

ON_CPU = ("attention on a CPU", "linear", "causal")
"""Whose kernels are used where they have PyTorch's bits, which is not everywhere."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not compiler_found():
        pytest.skip("the emulator is built by g++")
    directory = tmp_path_factory.mktemp("emulator")
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline.kernels.bad_input", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", EXPECTED)
def test_bad_input_is_refused_in_a_sentence_or_left_to_pytorch(
    what: str, outcomes: dict[str, str]
) -> None:
    operator = what.partition(":")[0]
    if operator in ON_CPU and outcomes[f"{operator}: good"] == "right by PyTorch":
        pytest.skip("there is no kernel that adds up as PyTorch does")

    assert outcomes[what] == EXPECTED[what]


def test_every_outcome_is_looked_at(outcomes: dict[str, str]) -> None:
    assert outcomes.keys() == EXPECTED.keys()
