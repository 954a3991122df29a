"""rewards/functions.py: a user's function is recognized without being run."""

from pathlib import Path

import pytest

from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from rewards.functions import FunctionFile, read_function


def read(tmp_path: Path, text: str) -> FunctionFile:
    file = tmp_path / "mine.py"
    file.write_text(text)
    return read_function(RewardConfig(name="mine", kind="function", path=f"{file}:score"))


HELPER = """
def get_text(completion):
    return completion[0]["content"]

def score(completions, **kwargs):
    return [len(get_text(each)) for each in completions]
"""

FORMS = (
    ("def score(episodes): return []", "episodes"),
    ("async def score(episodes): return []", "episodes"),
    ("def score(completions, **kwargs): return []", "trl"),
    ("def score(prompts, completions, answer): return []", "trl"),
    ("def score(completions, *, log_metric=None): return []", "trl"),
    (HELPER, "trl_conversational"),
    ("def score(queries, prompts, labels, **kwargs): return []", "openrlhf"),
    ("def score(data_source, solution_str, ground_truth, extra_info=None): return 1", "verl"),
    ("def score(solution_str, ground_truth): return 1", "verl"),
)


@pytest.mark.parametrize(("text", "form"), FORMS)
def test_the_form_follows_from_the_parameters(tmp_path: Path, text: str, form: str) -> None:
    assert read(tmp_path, text).form == form


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
