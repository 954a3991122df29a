"""rewards/functions.py: a user's function is read without running it."""

from pathlib import Path

import pytest
import torch

from pipeline.config import find_column
from pipeline.data.examples import Message
from pipeline.data.rows.shapes import check_columns
from pipeline.system.errors import ConfigError, DataError
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome, parse_outcomes
from rewards.functions import FunctionFile, read_function
from rewards.sources import Source, make_scorer, row_columns


def read_score(tmp_path: Path, text: str) -> FunctionFile:
    file = tmp_path / "mine.py"
    file.write_text(text)
    return read_function(RewardConfig(name="mine", kind="function", path=f"{file}:score"))


FORMS = (
    ("def score(episodes): return []", "episodes"),
    ("async def score(episodes): return []", "episodes"),
    ("def score(completions, **kwargs): return []", "trl"),
    ("def score(prompts, completions, answer): return []", "trl"),
    ("def score(completions, *, log_metric=None): return []", "trl"),
    ("def score(completions): return [completions[0][0]['content']]", "trl_conversational"),
    ("def score(queries, prompts, labels, **kwargs): return []", "openrlhf"),
    ("def score(data_source, solution_str, ground_truth, extra_info=None): return 1", "verl"),
    ("def score(solution_str, ground_truth): return 1", "verl"),
    ("\ufeffdef score(episodes): return []", "episodes"),  # a byte order mark
)


@pytest.mark.parametrize(("text", "form"), FORMS)
def test_form_is_detected_from_the_parameters(tmp_path: Path, text: str, form: str) -> None:
    assert read_score(tmp_path, text).form == form


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def scores(episodes): return []", "no `def score` at its top level; did you mean scores"),
        ("score = print", "no `def score` at its top level; available: none"),
        ("def score(x, y): return []", "score(x, y)"),
        ("def score(completions, completion_ids): return []", "(completion_ids)"),
        ("def score(episodes, tokenizer): return []", "(tokenizer)"),
        ("def score(:", "line 1 is not valid Python"),
    ],
)
def test_unsupported_function_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_score(tmp_path, text)

    assert str(error.value).startswith("rewards.mine.path")
    assert message in str(error.value)


def test_reading_a_function_does_not_run_its_file(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(episodes): return []"

    read_score(tmp_path, text)

    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("error")
def test_one_element_tensor_is_a_number_and_a_set_is_rejected() -> None:
    assert parse_outcomes([torch.ones(1, requires_grad=True)], 1) == [Outcome(1.0)]
    assert "returned set {1.0}, not a list" in str(parse_outcomes({1.0}, 1)[0].failure)


VERL_ROW = {
    "data_source": "toy",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3, "answer": "seven"},
}


@pytest.mark.parametrize(
    ("text", "columns", "reward"),
    [
        # verl's rows hold the correct answer in reward_model.
        (
            "def score(data_source, solution_str, ground_truth, extra_info):\n"
            "    return 10.0 * int(ground_truth) + extra_info['index']",
            {"ground_truth", "extra_info"},
            73.0,
        ),
        (
            "def score(completions, answer, index):\n"
            "    return [len(a) + i for a, i in zip(answer, index)]",
            {"answer", "index"},
            8.0,
        ),
        ("def score(queries, prompts, labels): return [float(labels[0])]", {"label"}, None),
        # A parameter that the code ignores needs no column, and a default is kept without one.
        ("def score(data_source, solution_str, ground_truth): return 1.0", set(), 1.0),
        ("def score(completions, scale=2.0): return [scale]", set(), 2.0),
        ("def score(solution_str, ground_truth=None, scale=3.0): return scale", set(), 3.0),
        ("def score(completions, missing): return [0.0 for _ in missing]", {"missing"}, None),
        ("def score(completions, **k): return [0.0 for _ in k['missing']]", {"missing"}, None),
        ("def score(completions, **k): return [0.0 for _ in k.pop('missing')]", {"missing"}, None),
        ("def score(completions, **k): return [float(i) for i in k['index']]", {"index"}, 3.0),
        ("def score(completions, **k): return [k['x'] if 'x' in k else 4.0]", set(), 4.0),
    ],
)
def test_required_parameters_are_read_from_columns_also_nested_ones(
    tmp_path: Path, text: str, columns: set[str], reward: float | None
) -> None:
    file = read_score(tmp_path, text)
    config = RewardConfig(name="mine", kind="function", path=f"{file.file}:score")
    source = Source(config, file)
    kept = row_columns([source])

    assert source.columns == columns
    if reward is None:
        (name,) = columns
        with pytest.raises(DataError, match=f"no row has the column {name}, which a reward"):
            check_columns([VERL_ROW], {}, kept)
        return
    check_columns([VERL_ROW], {}, kept)
    episode = Episode((Message("user", "3 + 4?"),), "7", extra=kept.select(VERL_ROW))
    assert make_scorer(source)([episode]) == [Outcome(reward)]


def test_column_setting_may_name_an_entry_of_a_nested_column() -> None:
    source = Source(RewardConfig(name="math", kind="math", column="reward_model.ground_truth"))
    episode = Episode((), "It is 7.", extra=row_columns([source]).select(VERL_ROW))

    assert episode.extra == {"reward_model.ground_truth": "7"}
    assert make_scorer(source)([episode]) == [Outcome(1.0)]
    # A CSV file has nested columns as text; others nest them twice.
    as_text = {"reward_model": str(VERL_ROW["reward_model"]), "a": {"b": {"c": 1}}}
    assert find_column(as_text, "ground_truth") == "7"
    assert find_column(as_text, "a.b.c") == 1
