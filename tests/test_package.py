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

ROOT = Path(__file__).resolve().parent.parent

SHORT = """
sft: {max_steps: 2, data: {max_eval_rows: 8}}
reward: {max_steps: 2, data: {max_eval_rows: 8}}
ppo: {max_steps: 1, rollout_size: 8, batch_size: 8, data: {max_eval_rows: 8}}
"""
"""A run of seconds, over the embedded default's settings."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of commands of an environment that has the wheel, and what it depends on."""
    directory = tmp_path_factory.mktemp("installed")
    # From a copy without its history: what is built must not hang on it.
    source = directory / "source"
    tracked = ("pipeline", "inference", "rewards", "evaluation", "rlhf_pipeline", "configs")
    steps = ("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference")
    for name in (*tracked, *steps):
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
    own = sysconfig.get_paths()["purelib"]
    (packages / "dependencies.pth").write_text(f"{own}\n")  # without the .pth files of `own`
    (wheel,) = directory.glob("rlhf_pipeline-*.whl")
    commands = environment / "bin"
    install = ("--python", str(commands / "python"), "install", "--no-deps", "--no-index")
    subprocess.run([*pip, *install, str(wheel)], check=True, cwd=directory)
    return commands


def run(cwd: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in `cwd`, in an environment that knows no checkout."""
    unwanted = {"PYTHONPATH", "RANK", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.jobs
def test_the_installed_commands_run_the_three_steps_and_chat(
    installed: Path, tmp_path: Path
) -> None:
    # A user's own modules in the directory where the command is started are not ours.
    for name in ("pipeline", "inference", "step1_sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is the user own')\n")
    (tmp_path / "train.py").write_text("raise ImportError('this is the user own')\n")
    (tmp_path / "short.yaml").write_text(SHORT)

    ended = run(tmp_path, installed / "rlhf", "--config", "short.yaml", "--output-dir", "x")

    assert ended.returncode == 0, ended.stderr[-2000:]
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert set(summary["steps"]) == {"step1_sft", "step2_reward", "step3_ppo"}
    assert "rlhf-chat --path x/step3_ppo/actor" in ended.stdout
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "What is 2 plus 2?"}\n')
    words = ("--path", "x/step3_ppo/actor", "--prompts", prompts, "--out", "answers.jsonl")
    answered = run(
        tmp_path, installed / "python", "-P", "-m", "rlhf_pipeline", "inference.generate", *words
    )
    assert answered.returncode == 0, answered.stderr[-2000:]
    refused = run(tmp_path, installed / "rlhf-serve", "--run", "x", "--slots", "0")
    assert (refused.returncode, refused.stderr) == (2, "error: --slots must be above 0, got 0\n")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 1


def test_rewards_are_tried_with_an_installed_package(installed: Path, tmp_path: Path) -> None:
    """Also where the user's own file has the name of one of ours."""
    (tmp_path / "rewards.py").write_text("def score(episodes): return [1.0 for _ in episodes]")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    words = ("--reward", "math", "rewards.py:score", "--data-path", "rows.jsonl")

    done = run(tmp_path, installed / "python", "-P", "-m", "rlhf_pipeline", "rewards", *words)

    assert done.returncode == 0, done.stderr
    assert "score    100.0%" in done.stdout


def test_nothing_but_one_package_is_importable(installed: Path, tmp_path: Path) -> None:
    steps = ("step0_pretrain", "step1_sft", "step2_reward", "step3_ppo", "step3_preference")
    names = ("pipeline", "inference", "rewards", "evaluation", "train", "chat", *steps)
    program = (
        "from importlib.util import find_spec\n"
        f"print([name for name in {names!r} if find_spec(name)])\n"
        "import rlhf_pipeline; rlhf_pipeline.add_to_path()\n"
        "import pipeline.config; print(pipeline.config.__file__)"
    )

    ended = run(tmp_path, installed / "python", "-c", program)

    nothing, config = ended.stdout.splitlines()
    assert nothing == "[]"
    assert config.endswith("site-packages/rlhf_pipeline/pipeline/config/__init__.py")


def test_another_program_uses_the_engine(installed: Path, tmp_path: Path) -> None:
    """Its own modules may have the names of ours, except `pipeline`."""
    (tmp_path / "train.py").write_text("rate = 0.5")
    program = (
        "import torch, train; from rlhf_pipeline import Engine\n"
        "engine = Engine(torch.nn.Linear(4, 4), optim={'lr': train.rate})\n"
        "engine.backward(engine(torch.ones(1, 4)).sum()); print(engine.step().lr)"
    )
    assert run(tmp_path, installed / "python", "-c", program).stdout == "0.5\n"

    (tmp_path / "pipeline.py").touch()
    hidden = run(tmp_path, installed / "python", "-c", program).stderr
    assert f"ImportError: rename {tmp_path}/pipeline.py, which shadows" in hidden


def test_the_sources_of_kernels_and_the_page_are_in_the_wheel(installed: Path) -> None:
    sources = {
        file.relative_to(ROOT)
        for kind in ("cpp", "cu", "cuh", "h", "js", "css", "html")
        for package in ("pipeline", "inference")
        for file in (ROOT / package).rglob(f"*.{kind}")
    }
    (package,) = installed.parent.glob("lib/python*/site-packages/rlhf_pipeline")

    assert Path("pipeline/kernels/include/prelude.cuh") in sources
    assert Path("inference/serve/page/index.html") in sources
    page = Path("docs/deepspeed_chat.md")  # messages quote its table
    assert not {each for each in (*sources, page) if not (package / each).exists()}


def test_presets_are_found_by_name_in_any_directory(installed: Path, tmp_path: Path) -> None:
    for preset in ("opt-1.3b.yaml", "configs/opt-1.3b.yaml"):
        words = ("--config", preset, "--output_dir", "x", "--print_config")
        ended = run(
            tmp_path, installed / "python", "-m", "rlhf_pipeline", "step1_sft.train", *words
        )

        assert ended.returncode == 0, ended.stderr
        assert "path: facebook/opt-1.3b" in ended.stdout


def test_scripts_find_the_environment_that_the_demo_made(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "python.sh"
    (tmp_path / "scripts").mkdir()
    shutil.copy(script, tmp_path / "scripts")
    bare = tmp_path / "bin"  # a machine whose own python3 has no package
    bare.mkdir()
    for name in ("python3", "python"):
        (bare / name).write_text("#!/bin/sh\nexit 1\n")
        (bare / name).chmod(0o755)
    ask = f"ROOT={tmp_path}; source {tmp_path}/scripts/python.sh; echo $PYTHON"

    def said() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [shutil.which("bash") or "bash", "-c", ask],
            env={"PATH": str(bare)},
            capture_output=True,
            text=True,
            check=False,
        )

    without = said()
    made = tmp_path / ".venv" / "bin"
    made.mkdir(parents=True)
    (made / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (made / "python").chmod(0o755)

    assert without.returncode == 2
    assert without.stderr.startswith("error: no Python here has the project's packages; run 'make")
    assert said().stdout.strip() == f"{tmp_path}/.venv/bin/python"
