"""rewards/verifiers.py: what a schema allows, and what is not a schema."""

import json
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome
from rewards.sources import read_source, scorer_of
from rewards.verifiers import read_json, read_schema

CASES = (
    ({"type": "integer"}, [1, 1.0, -3], [1.5, "1", True, None]),
    ({"type": ["number", "null"]}, [1.5, None], [False, "x"]),
    ({"enum": [1, "a", None]}, [1, "a", None], [True, "b", 2]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [True]}, {"a": [1], "b": 2}]),
    ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9, "text"], [0.9, 3]),
    ({"exclusiveMinimum": 1, "maximum": 3}, [1.1, 3], [1, 3.1]),
    ({"multipleOf": 0.5}, [1.5, 2], [0.35]),
    ({"minLength": 2, "maxLength": 3}, ["ab", "abc", 7], ["a", "abcd"]),
    ({"pattern": "^a"}, ["ab"], ["ba"]),
    ({"minItems": 1, "maxItems": 2, "uniqueItems": True}, [[1], [1, True]],
     [[], [1, 1], [1, 2, 3]]),
    ({"items": {"type": "string"}}, [["a"], [], {}], [["a", 1]]),
    ({"prefixItems": [{"const": 1}], "items": False}, [[1], []], [[2], [1, 2]]),
    ({"required": ["a"], "properties": {"a": {"type": "string"}}}, [{"a": "x", "b": 1}],
     [{}, {"a": 1}]),
    ({"properties": {"a": True}, "additionalProperties": False}, [{"a": 1}, {}], [{"b": 1}]),
    ({"minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}, {"a": 1, "b": 2}]),
    ({"anyOf": [{"type": "null"}, {"minimum": 5, "type": "number"}]}, [None, 6], [4]),
    ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, [0, 4], [2]),
    ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4]),
    ({"not": {"type": "string"}}, [1], ["a"]),
    ({"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"next": {"$ref": "#/$defs/t"}},
      "required": ["v"]}}}, [{"v": 1, "next": {"v": 2}}], [{"v": 1, "next": {}}]),
)  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_a_schema_allows_what_its_keywords_mean(
    schema: dict[str, object], good: list[object], bad: list[object]
) -> None:
    read = read_schema(json.dumps(schema), "it")

    assert [value for value in good if not read.is_valid(value)] == []
    assert [value for value in bad if read.is_valid(value)] == []


@pytest.mark.parametrize(
    ("response", "value", "is_json"),
    [
        ('{"a": 1}', {"a": 1}, True),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', {"a": 1}, True),
        ("```\n[1]\n```", [1], True),
        ('Here: {"a": 1}', None, False),
        ("```json\n1\n```\n```json\n2\n```", None, False),
        ("NaN", None, False),
        ("[" * 100_000, None, False),
    ],
)
def test_a_response_is_json_whole_or_in_its_only_fence(
    response: str, value: object, is_json: bool
) -> None:
    assert read_json(response) == (value, is_json)


def test_the_schema_is_a_file_or_a_column(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    from_file = read_source(RewardConfig(name="form", kind="json_schema", path=str(file)))
    from_column = read_source(RewardConfig(name="form", kind="json_schema"))
    rows = [
        Episode((), "[]", extra={"schema": {"type": "array"}}),
        Episode((), "{}", extra={"schema": '{"type": "array"}'}),
        Episode((), "{}", extra={}),
        Episode((), "{}", extra={"schema": {"minLength": "2"}}),
    ]

    assert [each.value for each in scorer_of(from_file)(rows)] == [0, 1, 1, 1]
    outcomes = scorer_of(from_column)(rows[:3])

    assert outcomes == [Outcome(1), Outcome(0), Outcome(None)]
    with pytest.raises(ConfigError, match="the column schema is not a JSON schema"):
        scorer_of(from_column)(rows[3:])
    assert (from_file.columns, from_column.columns) == (set(), {"schema"})
    assert from_file.fingerprint is not None
