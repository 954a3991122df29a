"""Every operator's folder has what docs/kernels.md asks of it."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.kernels.operators import HERE, cases_of, operators

TESTS = Path(__file__).parent


def lacks(module: ModuleType, *names: str) -> list[str]:
    """What of this a module doesn't have."""
    return [name for name in names if not hasattr(module, name)]


def test_every_folder_but_the_shared_ones_is_an_operator() -> None:
    folders = {each.parent.name for each in HERE.glob("*/*.py")}

    assert folders - set(operators()) == {"toolchain", "emulator"}


@pytest.mark.parametrize("name", operators())
def test_a_folder_has_what_others_ask_it_for(name: str) -> None:
    folder, tests = HERE / name, TESTS / name

    assert (folder / "dispatch.py").exists(), "dispatch.py"
    assert not lacks(cases_of(name), "timed")
    assert not lacks(
        import_module(f"tests.pipeline.kernels.{name}.bad_input"), "OPERATORS", "EXPECTED"
    )
    assert list(tests.glob("test_*.py"))
    for language, call in (("cpu*.cpp", "cpu.py"), ("cuda.cu", "cuda.py")):
        assert bool(list(folder.glob(language))) == (folder / call).exists(), language


@pytest.mark.parametrize("name", operators(on_gpu=True))
def test_an_operator_with_a_kernel_for_gpus_can_be_tested_and_measured(name: str) -> None:
    faults = import_module(f"tests.pipeline.kernels.{name}.faults")
    needed = ("SPECIALISATIONS", "QUICK", "GRID", "inputs_of", "run", "is_right")

    assert not lacks(cases_of(name), *needed)
    assert not lacks(import_module(f"pipeline.kernels.{name}.cuda"), "self_test")
    assert not lacks(faults, "FAULTS", "CASES", "SEEN_BY_SELF_TEST")
    assert f" {name}(" in (HERE / name / "cuda.cu").read_text()
