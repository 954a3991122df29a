from dataclasses import dataclass, field

import pytest

from pipeline.settings.build import Layer, build_config
from pipeline.system.errors import ConfigError, require
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    rate: float = 0.5
    """How fast (speed)."""

    def __post_init__(self) -> None:
        require(self.rate > 0, f"rate must be positive, got {self.rate}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Settings."""

    count: int = 1
    names: tuple[str, ...] = ()
    split: tuple[float, float] = (1.0, 2.0)
    words: dict[str, str] = field(default_factory=dict)
    inner: Inner = field(default_factory=lambda: Inner(rate=2.0))
    maybe: Inner | None = None
    flag: bool = False


def make_layer(**settings: object) -> Layer:
    return Layer(settings, "my.yaml")


def test_later_layers_override_and_sections_merge() -> None:
    low = make_layer(count=2, inner={"rate": 3}, words={"a": "b"})
    high = make_layer(inner={"rate": 4}, words={"c": "d"})

    config = build_config(Outer, [low, high])

    assert config == Outer(count=2, inner=Inner(rate=4.0), words={"c": "d"})


@pytest.mark.parametrize(
    ("values", "expected"),
    [(["a", "b c"], ("a", "b c")), (["a,b"], ("a,b",)), (['["x", "y"]'], ("x", "y"))],
)
def test_string_list_accepts_words_or_json(values: list[str], expected: tuple[str, ...]) -> None:
    assert build_config(Outer, [], [("names", values)]).names == expected


def test_optional_section_is_enabled_by_its_name_or_a_setting() -> None:
    assert build_config(Outer, [], [("maybe", [])]).maybe == Inner()
    assert build_config(Outer, [], [("maybe.rate", ["7"])]).maybe == Inner(rate=7.0)
    assert build_config(Outer, [make_layer(maybe={"rate": 7})], [("maybe", ["null"])]).maybe is None


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("count", ["x"], "s.count must be an integer, got x"),
        ("count", ["1.5"], "s.count must be an integer, got 1.5"),
        ("count", ["null"], "s.count must be an integer, got null"),
        ("maybe.rate", ["null"], "s.maybe.rate must be a number, got null"),
        ("count", [], "--s.count takes one value, got none"),
        ("count", ["1", "2"], "--s.count takes one value, got 2: 1 2"),
        ("names", [], "--s.names takes at least one value, got none"),
        ("split", ["1"], "s.split must be a list of 2 values, got [1]"),
        ("flag", ["maybe"], "s.flag must be true or false, got maybe"),
        ("inner.rate", ["-1"], "s.inner.rate must be positive, got -1.0"),
        ("maybe.rate", ["-1"], "s.maybe.rate must be positive, got -1.0"),
        ("maybe.rate", ["x"], "s.maybe.rate must be a number, got x"),
        ("inner", ["x"], "--s.inner is a section: set --s.inner.NAME VALUE instead"),
        ("counts", ["1"], "there is no setting s.counts; did you mean s.count?"),
        ("rate", ["1"], "there is no setting s.rate; did you mean s.inner.rate or s.maybe.rate?"),
        ("speed", ["1"], "there is no setting s.speed; did you mean s.inner.rate or s.maybe.rate?"),
        ("zzz", ["1"], "there is no setting s.zzz; --help lists the settings"),
    ],
)
def test_error_has_the_full_name_of_the_setting(
    option: str, values: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_config(Outer, [], [(option, values)], section="s.")

    assert str(error.value) == message


def test_contradiction_error_has_the_full_name_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^ppo\.batch_size 64 is larger than ppo\.rollout"):
        build_config(PPOConfig, [], [("rollout_size", ["8"])], section="ppo.")

    with pytest.raises(ConfigError, match=r"^sft\.model\.lora\.rank must be positive, got 0"):
        build_config(SFTConfig, [], [("model.lora.rank", ["0"])], section="sft.")
