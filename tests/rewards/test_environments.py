"""rewards/environments: reading files without running them, tools, and worker processes."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from rewards.environments.file import read_environment
from rewards.environments.pool import CallResult, EnvironmentPool
from rewards.environments.tools import Calculator, ToolEnvironment
from step3_ppo.config import PPOConfig
from tests.rewards.processes import command_line, is_alive, worker_processes

GAME = """
import os, subprocess, sys, time

class Base:
    def reset(self, row, *, seed):
        self.steps = []
        if row.get("how") == "bad opening":
            return "hello"
        return [{"role": "user", "content": f"{row['name']} {seed}"}]

class Game(Base):
    def step(self, answer):
        if answer == "hang":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            time.sleep(600)
        if answer == "exit":
            os._exit(7)
        if answer == "raise":
            raise ValueError("no")
        self.steps.append(answer)
        if answer == "end":
            return None
        return [{"role": "user", "content": " ".join(self.steps)}]

    def reward(self):
        return len(self.steps)
"""


@contextmanager
def run_pool(
    directory: Path, text: str = GAME, *, name: str = "Game", seconds: float = 20.0, count: int = 1
) -> Iterator[EnvironmentPool]:
    file = directory / "game.py"
    file.write_text(text)
    environment_file = read_environment(f"{file}:{name}")
    pool = EnvironmentPool(environment_file, workers=count, timeout_seconds=seconds)
    try:
        yield pool
    finally:
        pool.close()


def receive(pool: EnvironmentPool, count: int) -> dict[int, CallResult]:
    results: list[CallResult] = []
    while len(results) < count:
        results += pool.receive(wait=True)
    return {result.episode: result for result in results}


def last_content(result: CallResult) -> str:
    assert result.messages is not None, result.failure
    return result.messages[-1].content


def test_each_episode_has_its_own_state(tmp_path: Path) -> None:
    with run_pool(tmp_path, count=2) as pool:
        episodes = [pool.begin({"name": name}, seed=3) for name in "abcd"]
        openings = receive(pool, 4)
        for episode in episodes[:3]:
            pool.step(episode, f"x{episode}")
        after = receive(pool, 3)
        pool.step(episodes[0], "end")
        assert receive(pool, 1)[episodes[0]].messages is None
        for episode in episodes:
            pool.request_reward(episode)
        rewards = receive(pool, 4)

    assert [last_content(openings[episode]) for episode in episodes] == ["a 3", "b 3", "c 3", "d 3"]
    assert [last_content(after[episode]) for episode in episodes[:3]] == ["x1", "x2", "x3"]
    values = [rewards[episode].reward for episode in episodes]
    assert [value.outcome.value for value in values if value] == [2, 1, 1, 0]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("hang", "step took longer than 1 s"),
        ("exit", "step terminated its process with exit code 7"),
        ("raise", "step raised ValueError: no"),
    ],
)
def test_failed_episode_leaves_the_state_of_others_intact(
    tmp_path: Path, response: str, message: str
) -> None:
    with run_pool(tmp_path, seconds=1.0) as pool:
        good, bad = (pool.begin({"name": name}, seed=0) for name in "gb")
        receive(pool, 2)
        for text in ("one", "two"):
            pool.step(good, text)
            receive(pool, 1)
        pool.step(bad, response)
        start = time.monotonic()
        assert receive(pool, 1)[bad].failure == message
        assert time.monotonic() - start < 4.0

        pool.step(good, "three")
        assert last_content(receive(pool, 1)[good]) == "one two three"
        processes = worker_processes()
        hanging = [p for p in processes if "time.sleep(600)" in " ".join(command_line(p))]
    assert not hanging
    assert not any(map(is_alive, processes))


CLASSES = """
class Game:
    def reset(self, row, *, seed):
        self.answer = row["answer"], row.get("hint")

    def step(self, answer): ...

    def reward(self): ...

class Careful:
    def reset(self, row, *, seed):
        self.answer = row["answer"] if "answer" in row else ""

    def step(self, answer): ...

    def reward(self): ...

class Child(Game): ...  # inherited methods are not read

class Tools:
    def reset(self, stock, day="Monday", *, seed, owner, **row):
        self.town = row["town"]
        self.reward = 0.0

    def buy(self, item: str):
        \"\"\"Buy.\"\"\"
"""


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("Game", {"answer"}),
        ("Careful", set()),
        ("Child", set()),
        ("Tools", {"stock", "owner", "town"}),
    ],
)
def test_columns_required_by_reset_are_known_before_the_run(
    name: str, columns: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "game.py"
    file.write_text(CLASSES)

    config = PPOConfig(environment=f"{file}:{name}")

    assert config.row_columns.needed == columns
    assert config.row_columns.all


class Shop:
    """Tools with arguments of various types."""

    INSTRUCTIONS = "Buy well."

    def __init__(self) -> None:
        self.bought: list[str] = []
        self.reward = 0.5

    def reset(self, currency: str) -> str:
        self.currency = currency
        return f"Pay in {currency}."

    def buy(self, name: str, count: int = 1, kind: Literal["old", "new"] = "new") -> dict[str, Any]:
        """Buy things."""
        if count > 9:
            raise ValueError("there are 9")
        self.bought += [name] * count
        return {"bought": count, "kind": kind}

    def pay(self, price: float, notes: list[str] | None = None) -> str:
        """Pay."""
        return f"{price} {self.currency} {notes}"

    def fail(self) -> None:
        """Fail."""
        raise KeyError("till")

    def _hidden(self) -> None:
        raise AssertionError


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def shop() -> ToolEnvironment:
    environment = ToolEnvironment(Shop())
    row = {"currency": "EUR", "dialogue": [{"role": "user", "content": "Shop."}], "other": 1}
    opening = environment.reset(row, seed=0)
    assert [(turn.role, turn.content) for turn in opening] == [
        ("system", "Buy well."),
        ("user", "Shop.\n\nPay in EUR."),
    ]
    return environment


CALLS: Sequence[tuple[str, str]] = (
    (call("buy", name="pen", count=2), '{"bought": 2, "kind": "new"}'),
    (call("pay", price=3), "3 EUR None"),
    (call("pay", price=3.5, notes=["a"]), "3.5 EUR ['a']"),
    ("<tool_call>{buy</tool_call>", r"error: the call is not JSON: .*\(char 1\)"),
    ("<tool_call>[1]</tool_call>", 'error: a call is an object with "name" and "arguments"'),
    ('<tool_call>{"name": 3}</tool_call>', 'error: a call is an object with "name"'),
    (call("sell"), "error: there is no tool sell; the tools are buy, fail, pay"),
    (call("_hidden"), "error: there is no tool _hidden"),
    (call("reset", currency="USD"), "error: there is no tool reset"),
    (call("buy"), "error: buy: missing a required argument: 'name'"),
    (call("buy", name="pen", size=3), "error: buy: got an unexpected keyword argument 'size'"),
    (call("buy", name=3), "error: buy: name must be str, got 3"),
    (call("buy", name="pen", count=True), "error: buy: count must be int, got true"),
    (call("buy", name="pen", count=1.5), "error: buy: count must be int, got 1.5"),
    (call("buy", name="pen", kind="odd"), 'error: buy: kind must be .*old.*, got "odd"'),
    (call("buy", name="pen", count=10), "error: buy: there are 9"),
    ('<tool_call>{"name": "pay", "arguments": [3]}</tool_call>', 'error: pay: "arguments" must be'),
    ('<tool_call>{"name": "pay"', "error: the call is not JSON"),
)
"""Responses of the model, and the results of their calls."""


@pytest.mark.parametrize(("response", "result"), CALLS)
def test_tool_call_returns_its_result_or_an_error_message(
    shop: ToolEnvironment, response: str, result: str
) -> None:
    observation = shop.step(response)

    assert observation is not None
    assert [turn.role for turn in observation] == ["user"]
    match = re.fullmatch(r"<tool_response>(.*)</tool_response>", observation[0].content)
    assert match
    assert re.match(re.escape(result) if not result.startswith("error") else result, match[1])


def test_calculator_computes_and_reports_division_by_0() -> None:
    environment = ToolEnvironment(Calculator())
    opening = environment.reset({"dialogue": [{"role": "user", "content": "1+2="}]}, seed=0)

    assert [turn.content for turn in opening] == ["1+2="]
    observation = environment.step(call("add", a=1, b=2))
    assert observation is not None
    assert observation[0].content == "<tool_response>3</tool_response>"
    divided = environment.step(call("divide", a=1, b=0))
    assert divided is not None
    assert "error: divide: the divisor is 0" in divided[0].content
    assert environment.reward() is None
