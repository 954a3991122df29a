"""What becomes of a key of DeepSpeed's configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Fate = Literal["used", "no effect", "refused"]


@dataclass(frozen=True)
class Key:
    """What becomes of one key, or of a whole section."""

    fate: Fate

    text: str
    """Used: the setting of ours that it gives. No effect: why. Refused: why, and the mend."""

    neutral: tuple[object, ...] = ()
    """Values of a refused key that ask for nothing, and pass."""

    def asks_for_nothing(self, value: object) -> bool:
        """Whether `value` leaves the feature off: `{"enabled": false}`, or neutral throughout."""
        if isinstance(value, Mapping):
            if "enabled" in value:
                return value["enabled"] in (None, False, "auto")
            return all(self.asks_for_nothing(inner) for inner in value.values())
        return value in self.neutral


def used(pairs: Mapping[str, str]) -> dict[str, Key]:
    """Keys that give the settings named beside them."""
    return {key: Key("used", text) for key, text in pairs.items()}


def no_effect(prefix: str, names: Iterable[str], reason: str) -> dict[str, Key]:
    """Keys that may be there and change nothing, all for one reason."""
    return {prefix + name: Key("no effect", reason) for name in names}


def refused(pairs: Mapping[str, str], *neutral: object) -> dict[str, Key]:
    """Keys that ask for what is not there, unless their value is null, false or `neutral`."""
    return {key: Key("refused", text, (None, False, *neutral)) for key, text in pairs.items()}
