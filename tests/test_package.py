"""The wheel as a user installs it: no checkout, another directory, installed commands."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.sources import PACKAGES, ROOT


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` directory of an environment with the wheel and its dependencies."""
    directory = tmp_path_factory.mktemp("installed")
    # Built from a copy without git history, on which the result must not depend.
    source = directory / "source"
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "docs").mkdir()
    files = ("train.py", "chat.py", "pyproject.toml", "README.md", "LICENSE")
    for name in (*files, "docs/deepspeed_chat.md"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory))
    subprocess.run([*pip, *build, str(source)], check=True, cwd=directory)
    shutil.rmtree(source)

    environment = directory / "venv"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    site = sysconfig.get_paths()["purelib"]
    (packages / "dependencies.pth").write_text(f"{site}\n")  # without the .pth files of `site`
    (wheel,) = directory.glob("rlhf_pipeline-*.whl")
    commands = environment / "bin"
    install = ("--python", str(commands / "python"), "install", "--no-deps", "--no-index")
    subprocess.run([*pip, *install, str(wheel)], check=True, cwd=directory)
    return commands


def run(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `cwd`, in an environment that doesn't refer to the checkout."""
    unwanted = {"PYTHONPATH", "RANK", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.jobs
def test_installed_commands_run_a_step_and_generate(bin_dir: Path, tmp_path: Path) -> None:
    # A user's own modules in the working directory must not shadow ours.
    for name in ("pipeline", "inference", "step1_sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a user module')\n")
    (tmp_path / "train.py").write_text("raise ImportError('a user module')\n")
    (tmp_path / "short.yaml").write_text("sft: {max_steps: 1, data: {max_eval_rows: 8}}")
    args = ("--config", "short.yaml", "--step", "1", "--output-dir", "x")

    trained = run(tmp_path, bin_dir / "rlhf", *args)

    assert trained.returncode == 0, trained.stderr[-2000:]
    assert set(json.loads((tmp_path / "x/summary.json").read_text())["steps"]) == {"step1_sft"}
    assert "rlhf-chat --path x/step1_sft" in trained.stdout
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 2 plus 2?"}\n')
    args = ("--path", "x/step1_sft", "--prompts", prompts, "--out", "answers.jsonl")
    generated = run(
        tmp_path, bin_dir / "python", "-P", "-m", "rlhf_pipeline", "inference.generate", *args
    )
    assert generated.returncode == 0, generated.stderr[-2000:]
    rejected = run(tmp_path, bin_dir / "rlhf-serve", "--run", "x", "--slots", "0")
    assert (rejected.returncode, rejected.stderr) == (2, "error: --slots must be positive, got 0\n")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1


def test_installed_package_tries_rewards_on_rows(bin_dir: Path, tmp_path: Path) -> None:
    """Also if the user's file is named like one of our packages."""
    (tmp_path / "rewards.py").write_text("def score(episodes): return [1.0 for _ in episodes]")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    args = ("--reward", "math", "rewards.py:score", "--data-path", "rows.jsonl")

    result = run(tmp_path, bin_dir / "python", "-P", "-m", "rlhf_pipeline", "rewards", *args)

    assert result.returncode == 0, result.stderr
    assert "score    100.0%" in result.stdout


def test_wheel_makes_only_one_package_importable(bin_dir: Path, tmp_path: Path) -> None:
    names = ({*PACKAGES} - {"rlhf_pipeline"}) | {"train", "chat"}
    program = (
        "from importlib.util import find_spec\n"
        f"print([name for name in {names!r} if find_spec(name)])\n"
        "import rlhf_pipeline; rlhf_pipeline.add_to_path()\n"
        "import pipeline.config; print(pipeline.config.__file__)"
    )

    result = run(tmp_path, bin_dir / "python", "-c", program)

    importable, config = result.stdout.splitlines()
    assert importable == "[]"
    assert config.endswith("site-packages/rlhf_pipeline/pipeline/config/__init__.py")


def test_installed_engine_trains_in_another_program(bin_dir: Path, tmp_path: Path) -> None:
    """Its own modules may have the names of ours, except `pipeline`."""
    (tmp_path / "train.py").write_text("rate = 0.5")
    program = (
        "import torch, train; from rlhf_pipeline import Engine\n"
        "engine = Engine(torch.nn.Linear(4, 4), optim={'lr': train.rate})\n"
        "engine.backward(engine(torch.ones(1, 4)).sum()); print(engine.step().lr)"
    )
    assert run(tmp_path, bin_dir / "python", "-c", program).stdout == "0.5\n"

    (tmp_path / "pipeline.py").touch()
    hidden = run(tmp_path, bin_dir / "python", "-c", "from rlhf_pipeline import Engine").stderr
    assert f"ImportError: rename {tmp_path}/pipeline.py, which shadows" in hidden


def test_wheel_contains_modules_kernel_sources_and_page_files(bin_dir: Path) -> None:
    sources = {
        file.relative_to(ROOT)
        for kind in ("py", "cpp", "cu", "cuh", "h", "js", "css", "html")
        for package in {*PACKAGES} - {"rlhf_pipeline"}
        for file in (ROOT / package).rglob(f"*.{kind}")
    }
    (package,) = bin_dir.parent.glob("lib/python*/site-packages/rlhf_pipeline")

    assert Path("pipeline/kernels/include/prelude.cuh") in sources
    assert Path("inference/serve/page/index.html") in sources
    page = Path("docs/deepspeed_chat.md")  # messages quote its table
    assert not {path for path in (*sources, page) if not (package / path).exists()}


def test_installed_command_finds_presets_by_name(bin_dir: Path, tmp_path: Path) -> None:
    for preset in ("opt-1.3b.yaml", "configs/opt-1.3b.yaml"):
        args = ("--config", preset, "--output_dir", "x", "--print_config")
        result = run(tmp_path, bin_dir / "python", "-m", "rlhf_pipeline", "step1_sft.train", *args)

        assert result.returncode == 0, result.stderr
        assert "path: facebook/opt-1.3b" in result.stdout


def test_scripts_find_the_environment_created_by_the_demo(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "python.sh"
    (tmp_path / "scripts").mkdir()
    shutil.copy(script, tmp_path / "scripts")
    system_bin = tmp_path / "bin"  # the system's python3 has no packages
    system_bin.mkdir()
    for name in ("python3", "python"):
        (system_bin / name).write_text("#!/bin/sh\nexit 1\n")
        (system_bin / name).chmod(0o755)
    script_line = f"ROOT={tmp_path}; source {tmp_path}/scripts/python.sh; echo $PYTHON"

    def run_script() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("bash") or "bash", "-c", script_line],
            env={"PATH": str(system_bin)},
            capture_output=True,
            text=True,
            check=False,
        )

    missing = run_script()
    venv_bin = tmp_path / ".venv" / "bin"
    venv_bin.mkdir(parents=True)
    (venv_bin / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv_bin / "python").chmod(0o755)

    assert missing.returncode == 2
    assert missing.stderr.startswith("error: no Python here has the project's packages; run 'make")
    assert run_script().stdout.strip() == f"{tmp_path}/.venv/bin/python"
