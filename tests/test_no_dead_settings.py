"""Every setting is read by code."""

import ast
import importlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from tests.sources import PACKAGES, ROOT
from train import STAGES

CONFIG_MODULES = (
    *("evaluation.config", "evaluation.winrate", "inference.chat", "inference.generate"),
    *("inference.serve.config", "inference.settings", "pipeline.config", "pipeline.export.command"),
    *("pipeline.launch.layout", "pipeline.plan.request", "rewards.config", "rewards.sampling"),
    *("rewards.select", "step0_pretrain.config", "step1_sft.config", "step1_sft.evaluate"),
    *("step2_reward.config", "step2_reward.evaluate", "step3_ppo.config"),
    "step3_preference.config",
)
NOT_SETTINGS = {"Stage", "CommandLine"}


def setting_names() -> Iterator[str]:
    """Yield `Class.field` for every dataclass that the config modules define."""
    for module in map(importlib.import_module, CONFIG_MODULES):
        for name, value in vars(module).items():
            is_local = isinstance(value, type) and value.__module__.startswith(module.__name__)
            if is_local and is_dataclass(value) and name not in NOT_SETTINGS:
                yield from (f"{name}.{field.name}" for field in fields(value))


def names_read() -> set[str]:
    """Return names read as attributes, by getattr, or as options in the steps' settings."""
    classes = [stage.config_class for stage in STAGES]
    tables = [table for cls in classes for table in (cls.OPTIONS, cls.RUN_OPTIONS)]
    names = {option for table in tables for option in table}
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    for file in [*files, ROOT / "train.py", ROOT / "chat.py"]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        checks = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) in checks:
                continue
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                names |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return names


def test_every_setting_is_read() -> None:
    read = names_read()

    dead = {setting for setting in setting_names() if setting.split(".")[1] not in read}

    assert not dead
