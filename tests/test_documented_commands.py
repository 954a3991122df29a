"""Every command in README and docs names existing programs and options.

Nothing is run here: `train.py`'s and the steps' command lines are parsed to settings, modules and
scripts looked up. The steps themselves run in test_end_to_end.py.
"""

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.options import parse_step
from pipeline.plan.request import parse_request
from pipeline.plan.resolve import step_configs
from pipeline.plan.stage import drop_unselected, split_methods
from pipeline.system.errors import UserError
from train import STAGES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = {stage.module: stage.config_class for stage in STAGES}
FILES = {
    "my.yaml": "ppo: {kl_coef: 0.1}\n",
    "FILE": "max_steps: 3\n",
    "ds_config.json": '{"zero_optimization": {"stage": 2}}\n',
    "hosts": "worker-0 slots=8\nworker-1 slots=8\n",
}
"""Files that the commands expect a user to have written."""


def command_lines() -> Iterator[tuple[str, str]]:
    """Yield (page, command) for each command in a code block, without comments."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                bare = re.sub(r"(^|\s)#.*", "", line)
                yield from (
                    (page.name, part) for part in re.split(r"&&|&\s*$", bare) if part.strip()
                )


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, words) for each command in a code block, without comments and variables."""
    for page, line in command_lines():
        words = shlex.split(line)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        if words:
            yield page, [word for word in words if word != "..."]


def recipe_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (settings file, words) for each command of `make recipe`."""
    for preset in sorted((ROOT / "configs" / "recipes").glob("*.yaml")):
        make = ["make", "-n", "recipe", f"NAME={preset.name[0]}"]
        result = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
        lines = result.stdout.replace("\\\n", " ").splitlines()
        yield from ((preset.name, shlex.split(line)) for line in lines)


def find_error(words: list[str]) -> str:
    """Return why a command would fail, or an empty string."""
    program, *rest = words
    if Path(program).name in ("python", "python3", "torchrun") and "-m" in rest:
        module, *options = rest[rest.index("-m") + 1 :]
        if importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
        return check_settings(CONFIGS[module], options) if module in CONFIGS else ""
    match Path(program).name, rest:
        case "python", ["train.py", *options]:
            return check_request(options)
        case (("python" | "bash"), [script, *_]):
            return "" if (ROOT / script).is_file() else f"there is no {script}"
        case "make", [target, *_]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            return "" if f"\n{target}:" in makefile else f"make has no target {target}"
        case _:
            return ""


def check_request(options: list[str]) -> str:
    try:
        request = parse_request(options, STAGES)
        stages = drop_unselected(STAGES, request.request.step, ())
        step_configs(request, split_methods(stages, request.request.method), world=2)
    except UserError as error:
        return str(error)
    return ""


def check_settings(config_class: type, options: list[str]) -> str:
    try:
        parse_step(config_class, options)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.jobs
def test_documented_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    commands = [*documented_commands(), *recipe_commands()]

    errors = [
        f"{page}: {shlex.join(words)}: {error}"
        for page, words in commands
        if (error := find_error(words))
    ]

    assert len(commands) > 60
    assert not errors, "\n".join(errors)


def test_dry_run_of_a_recipe_runs_its_first_training_only() -> None:
    make = ["make", "-n", "recipe", "NAME=a", "ARGS=--dry-run"]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    commands = re.findall(r"^(?:: )?python \S+", printed, re.MULTILINE)
    assert commands == ["python train.py", ": python train.py", ": python -m"]
