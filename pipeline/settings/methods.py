"""Rows of settings by name: what a step's setting `method` stands for.

A dataclass of settings has them as `METHODS`, by name; one without them has no methods. A row gives
way to all that is given, and is laid over what is not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.settings.build import Layer
from pipeline.settings.plain import Option


def method_layer(
    config_class: type, layers: Sequence[Layer], overrides: Sequence[Option] = ()
) -> Layer:
    """The row that layers and overrides name, the last one winning; no settings without a name.

    A name that no row has gives an empty layer, and an error where the settings are built.
    """
    named = [layer.settings["method"] for layer in layers if "method" in layer.settings]
    named += [words[0] for name, words in overrides if name == "method" and words]
    name = str(named[-1]) if named else ""
    return Layer(rows_of(config_class).get(name, {}), f"the method {name}")


def rows_of(config_class: type) -> Mapping[str, Mapping[str, Any]]:
    """The methods of a step, by name; empty for a step without any."""
    return getattr(config_class, "METHODS", {})
