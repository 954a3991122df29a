"""Imports point one way: train.py, steps, evaluation, rewards, inference, pipeline by layers."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEPS = {"step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference"}
OURS = STEPS | {
    *("evaluation", "inference", "pipeline", "rewards"),
    *("rlhf_pipeline", "train", "chat"),
}

MAY_IMPORT = {
    "pipeline": {"pipeline"},
    "inference": {"inference", "pipeline"},
    "rewards": {"rewards", "inference", "pipeline"},
    "evaluation": {"evaluation", "rewards", "inference", "pipeline"},
    **{step: {step, "inference", "pipeline", "rewards", "evaluation"} for step in sorted(STEPS)},
    "chat": {"inference", "pipeline"},
    "train": STEPS | {"inference", "pipeline", "rewards", "evaluation"},
    "rlhf_pipeline": {"rlhf_pipeline", "train", "inference", "pipeline"},
}


LAYERS = (
    {"system"},
    {"files", "parallel", "settings"},
    {"config"},
    {"cli", "watchdog"},
    {"kernels"},
    {"demo"},
    {"data", "engine", "launch"},
    {"models"},
    {"budget"},
    {"plan", "report"},
    {"export"},
    {"run"},
    {"guards"},
)
"""The subpackages of `pipeline`, lowest layer first: each imports those of lower layers."""

INFERENCE_LAYERS = (
    {"settings", "text", "tensor_parallel", "ratings", "reward_model"},
    {"engine"},
    {"replica", "generation"},
    {"hybrid_engine", "conversation", "responses"},
    {"chat", "serve"},
)
"""The same of `inference`."""

PROGRAMS = {
    *("inference/generate.py", "pipeline/data/inspect.py"),
    *("rewards/select.py", "evaluation/winrate.py"),
}
"""Run by `python -m`, as every `__main__.py` is: they import anything, and nothing imports them."""


def modules(file: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (
                [f"{module}.{name.name}" for name in node.names] if module in OURS else [module]
            )


def imported(file: Path) -> Iterator[str]:
    """First words of the modules that a file imports."""
    return (module.partition(".")[0] for module in modules(file))


def subpackage(module: str) -> str:
    """The subpackage of a module of `pipeline` or `inference`."""
    return module.split(".")[1]


def module_files() -> dict[str, Path]:
    """The files by module; without `__init__.py`, which re-exports names."""
    packages = [package for package in MAY_IMPORT if (ROOT / package).is_dir()]
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for file in files
        if file.name != "__init__.py"
    }


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py")) or [ROOT / f"{package}.py"]
    wrong = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported(file)
        if name in OURS - MAY_IMPORT[package]
    }

    assert not wrong


@pytest.mark.parametrize(
    ("package", "layers"), [("pipeline", LAYERS), ("inference", INFERENCE_LAYERS)]
)
def test_subpackages_import_lower_layers_alone(package: str, layers: tuple[set[str], ...]) -> None:
    """So that no two subpackages depend on each other, even indirectly."""
    layer = {name: number for number, names in enumerate(layers) for name in names}
    wrong: set[str] = set()
    for file in sorted((ROOT / package).rglob("*.py")):
        path = file.relative_to(ROOT)
        own_version = path == Path(package, "__init__.py")
        if file.name == "__main__.py" or str(path) in PROGRAMS or own_version:
            continue
        own = path.parts[1].removesuffix(".py")
        for module in modules(file):
            if not module.startswith(f"{package}.") or subpackage(module) in (own, "__version__"):
                continue
            if layer[subpackage(module)] >= layer[own]:
                wrong.add(f"{path} imports {module}")

    assert not wrong, "\n".join(sorted(wrong))


def test_the_architecture_page_shows_these_layers_and_names_files_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    shown = page.partition("## Layers")[2].split("```")[1].splitlines()
    rows = [set(line[12:].split()) for line in shown]
    named = re.findall(r"`((?:[a-z]+|step[0-3]_[a-z]+)/[\w./]+)`", page)

    assert rows[-len(LAYERS) - len(INFERENCE_LAYERS) :] == [*INFERENCE_LAYERS[::-1], *LAYERS[::-1]]
    assert len(named) > 50
    assert not [name for name in named if not (ROOT / name).exists()]


def test_there_are_no_circular_imports() -> None:
    """Imports within functions count."""
    names = module_files()
    graph = {name: names.keys() & set(modules(file)) for name, file in names.items()}

    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["pipeline.models", "pipeline.engine", "pipeline.data"])
def test_folders_and_files_of_a_subpackage_do_not_import_in_a_circle(folder: str) -> None:
    """A folder counts as one: no file of it imports a file that imports another file of it."""
    names = {name: file for name, file in module_files().items() if name.startswith(f"{folder}.")}
    parts = {name: name.removeprefix(f"{folder}.").split(".")[0] for name in names}
    graph = dict[str, set[str]]()
    for name, file in names.items():
        imports = {parts[module] for module in modules(file) if module in names}
        graph.setdefault(parts[name], set()).update(imports - {parts[name]})

    assert len(graph) > 4
    TopologicalSorter(graph).prepare()


def test_pipeline_does_not_name_the_steps() -> None:
    """A step describes itself by `StepConfig.workload` and `Stage`."""
    # They name packages, the splits of sets on the Hub, or the settings for others' options.
    lists = {"pipeline/system/installation.py", "pipeline/data/rows/sources.py"}
    lists |= {"pipeline/settings/deepspeed_chat.py"}
    names = STEPS | {"ppo", "step1", "step2", "step3"}
    found = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / "pipeline").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
        if str(file.relative_to(ROOT)) not in lists
    }

    assert not found


@pytest.mark.jobs
def test_no_module_imports_a_program() -> None:
    programs = {path.removesuffix(".py").replace("/", ".") for path in PROGRAMS}
    files = [file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")]

    assert not [
        file
        for file in files
        for module in modules(file)
        if module in programs or module.endswith(".__main__")
    ]


def test_nothing_but_the_tests_imports_the_tests() -> None:
    files = [ROOT / "train.py", ROOT / "chat.py"]
    packages = (*MAY_IMPORT, "benchmarks", "scripts")
    files += [file for package in packages for file in (ROOT / package).rglob("*.py")]

    assert not [file for file in files if "tests" in imported(file)]


@pytest.mark.parametrize(
    "module",
    [
        *("train", "step0_pretrain.config", "step1_sft.config", "step2_reward.config"),
        *("step3_ppo.config", "rewards.sources", "evaluation.config", "inference.serve.config"),
        "pipeline.export.command",
    ],
)
def test_settings_and_train_import_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"torch", "transformers", "datasets", "numpy", "peft"} & set(loaded)
