"""Imports point one way: train.py, steps, evaluation, rewards, inference, pipeline by layers."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
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
    {"chat", "serve", "remote"},
)
"""The layers of `inference`."""

PROGRAMS = {
    *("inference/generate.py", "pipeline/data/inspect.py"),
    *("rewards/select.py", "evaluation/winrate.py"),
}
"""Run by `python -m`, as every `__main__.py` is: they import anything, and nothing imports them."""


@cache
def find_imports(file: Path) -> list[str]:
    """Return the modules that a file imports, anywhere in it."""
    imports = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{name.name}" for name in node.names]
            imports += names if module in OURS else [module]
    return imports


def imported_packages(file: Path) -> Iterator[str]:
    """Yield the top-level packages that a file imports."""
    return (module.partition(".")[0] for module in find_imports(file))


def subpackage(module: str) -> str:
    """Return the subpackage of a module of `pipeline` or `inference`."""
    return module.split(".")[1]


def module_files() -> dict[str, Path]:
    """Return the files by module; without `__init__.py`, which re-exports names."""
    packages = [package for package in MAY_IMPORT if (ROOT / package).is_dir()]
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for file in files
        if file.name != "__init__.py"
    }


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_packages_below_them(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py")) or [ROOT / f"{package}.py"]
    violations = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported_packages(file)
        if name in OURS - MAY_IMPORT[package]
    }

    assert not violations


@pytest.mark.parametrize(
    ("package", "layers"), [("pipeline", LAYERS), ("inference", INFERENCE_LAYERS)]
)
def test_subpackages_import_only_lower_layers(package: str, layers: tuple[set[str], ...]) -> None:
    """No two subpackages then depend on each other, even indirectly."""
    layer = {name: number for number, names in enumerate(layers) for name in names}
    violations: set[str] = set()
    for file in sorted((ROOT / package).rglob("*.py")):
        path = file.relative_to(ROOT)
        is_version = path == Path(package, "__init__.py")
        if file.name == "__main__.py" or str(path) in PROGRAMS or is_version:
            continue
        name = path.parts[1].removesuffix(".py")
        for module in find_imports(file):
            if not module.startswith(f"{package}.") or subpackage(module) in (name, "__version__"):
                continue
            if layer[subpackage(module)] >= layer[name]:
                violations.add(f"{path} imports {module}")

    assert not violations, "\n".join(sorted(violations))


def test_architecture_page_shows_the_layers_and_names_existing_files() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    lines = page.partition("## Layers")[2].split("```")[1].splitlines()
    rows = [set(line[12:].split()) for line in lines]
    paths = re.findall(r"`((?:[a-z]+|step[0-3]_[a-z]+)/[\w./]+)`", page)

    assert rows[-len(LAYERS) - len(INFERENCE_LAYERS) :] == [*INFERENCE_LAYERS[::-1], *LAYERS[::-1]]
    assert len(paths) > 50
    assert not [name for name in paths if not (ROOT / name).exists()]


def test_modules_have_no_circular_imports() -> None:
    """Imports within functions count."""
    files = module_files()
    graph = {name: files.keys() & set(find_imports(file)) for name, file in files.items()}

    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("folder", ["pipeline.models", "pipeline.engine", "pipeline.data"])
def test_folders_of_a_subpackage_have_no_circular_imports(folder: str) -> None:
    """A folder counts as one: no file of it imports a file that imports another file of it."""
    files = {name: file for name, file in module_files().items() if name.startswith(f"{folder}.")}
    children = {name: name.removeprefix(f"{folder}.").split(".")[0] for name in files}
    graph = dict[str, set[str]]()
    for name, file in files.items():
        imports = {children[module] for module in find_imports(file) if module in files}
        graph.setdefault(children[name], set()).update(imports - {children[name]})

    assert len(graph) > 4
    TopologicalSorter(graph).prepare()


def test_pipeline_does_not_name_the_steps() -> None:
    """A step describes itself by `StepConfig.workload` and `Stage`."""
    # They name packages, splits of Hub datasets, or the settings of DeepSpeed-Chat's options.
    exceptions = {"pipeline/system/installation.py", "pipeline/data/rows/sources.py"}
    exceptions |= {"pipeline/settings/deepspeed_chat.py"}
    names = STEPS | {"ppo", "step1", "step2", "step3"}
    violations = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / "pipeline").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
        if str(file.relative_to(ROOT)) not in exceptions
    }

    assert not violations


@pytest.mark.jobs
def test_no_module_imports_a_command() -> None:
    programs = {path.removesuffix(".py").replace("/", ".") for path in PROGRAMS}
    files = [file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")]

    assert not [
        file
        for file in files
        for module in find_imports(file)
        if module in programs or module.endswith(".__main__")
    ]


def test_only_tests_import_tests() -> None:
    files = [ROOT / "train.py", ROOT / "chat.py"]
    packages = (*MAY_IMPORT, "benchmarks", "scripts")
    files += [file for package in packages for file in (ROOT / package).rglob("*.py")]

    assert not [file for file in files if "tests" in imported_packages(file)]


def test_config_modules_import_no_heavy_packages() -> None:
    steps = ("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "evaluation")
    configs = [f"{package}.config" for package in (*steps, "inference.serve")]
    modules = ["train", *configs, "rewards.sources", "pipeline.export.command"]
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"torch", "transformers", "datasets", "numpy", "peft"} & set(loaded)
