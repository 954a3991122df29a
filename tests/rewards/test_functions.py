"""rewards/functions.py: a user's function is recognized without being run."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from rewards.config import Form, RewardConfig
from rewards.functions import ALL_COLUMNS, FunctionFile, read_function


def read(
    tmp_path: Path, text: str, *, column: str | None = None, form: Form = "auto"
) -> FunctionFile:
    file = tmp_path / "mine.py"
    file.write_text(text)
    path = f"{file}:score"
    config = RewardConfig(name="mine", kind="function", path=path, column=column, form=form)
    return read_function(config)


HELPER = """
def get_text(completion):
    return completion[0]["content"]

def score(completions, **kwargs):
    return [len(get_text(each)) for each in completions]

def another(episodes):
    return [each.extra["label"] for each in episodes]
"""
"""A function whose helper annotates completions, next to an unrelated one."""

BESIDE = (
    "def get_text(c): return c['content']\ndef score(completions): return [1 for c in completions]"
)

FORMS = (
    ("def score(episodes): return []", "episodes", set()),
    ("async def score(episodes): return []", "episodes", set()),
    ("def score(episodes): return [e.extra['answer'] for e in episodes]", "episodes", {"answer"}),
    ("def score(episodes): return [e.extra.get('a') for e in episodes]", "episodes", {"a"}),
    ("def score(episodes): return [f(e.extra) for e in episodes]", "episodes", {ALL_COLUMNS}),
    ("def score(completions, **kwargs): return []", "trl", set()),
    ("def score(prompts, completions, answer): return []", "trl", {"answer"}),
    ("def score(completions, **kw): return kw['solution']", "trl", {"solution"}),
    ("def score(completions, **kw): return other(**kw)", "trl", {ALL_COLUMNS}),
    ("def score(completions, *, log_metric=None): return []", "trl", set()),
    (HELPER, "trl_conversational", set()),
    (BESIDE, "trl", set()),
    ("def score(queries, prompts, labels): return []", "openrlhf", {"label"}),
    ("def score(queries, prompts, labels, **kwargs): return []", "openrlhf", {"label"}),
    ("def score(data_source, solution_str, ground_truth, extra_info=None): return 1", "verl",
     {"data_source", "ground_truth", "extra_info"}),
    ("def score(solution_str, ground_truth): return 1", "verl", {"ground_truth"}),
)  # fmt: skip


@pytest.mark.parametrize(("text", "form", "columns"), FORMS)
def test_the_form_and_the_columns_follow_from_the_parameters(
    tmp_path: Path, text: str, form: str, columns: set[str]
) -> None:
    function = read(tmp_path, text)

    assert (function.form, set(function.columns)) == (form, columns)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def scores(episodes): return []", "no `def score` at its top level; did you mean scores"),
        ("score = print", "no `def score` at its top level; it takes none"),
        ("def score(x, y): return []", "score(x, y)"),
        ("def score(completions, completion_ids): return []", "(completion_ids)"),
        ("def score(episodes, tokenizer): return []", "(tokenizer)"),
        ("def score(:", "line 1 is not valid Python"),
    ],
)
def test_what_can_not_be_called_is_refused_in_a_sentence(
    tmp_path: Path, text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)

    assert str(error.value).startswith("rewards.mine.path")
    assert sentence in str(error.value)


def test_reading_a_function_runs_nothing_of_its_file(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(episodes): return []"

    read(tmp_path, text)

    assert not (tmp_path / "ran").exists()
