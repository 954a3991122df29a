"""What a chat template gets besides the dialogue: arguments such as enable_thinking, the date.

Both are written into the template that is saved with the model, so that chat, other software and
the next step render a dialogue as it was trained on.
"""

import json
import re
from collections.abc import Iterable, Mapping
from datetime import date
from keyword import iskeyword

from pipeline.errors import ConfigError

Argument = bool | int | float | str

_CLOCK = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<form>.*?)(?P=quote)\s*\)""")
_OWN = ("messages", "add_generation_prompt", "tools", "documents")


def with_arguments(template: str, arguments: Mapping[str, Argument]) -> str:
    """The template with defaults for variables that its caller does not set.

    A template that has these defaults already is returned as it is.

    Raises:
        ConfigError: a name is not a variable of a template, or one that the template never reads.
    """
    lines = ""
    for name, value in arguments.items():
        if not name.isidentifier() or iskeyword(name) or name in _OWN:
            raise ConfigError(f"data.template_args {name} is not an argument that can be set")
        if never_read(template, [name]):
            raise ConfigError(
                f"data.template_args {name}: the chat template never reads it; remove it, or check"
                " its spelling"
            )
        literal = (
            str(value).lower() if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
        )
        lines += f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
    return template if template.startswith(lines) else lines + template


def never_read(template: str, names: Iterable[str]) -> list[str]:
    """The names that the template never reads."""
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]


def with_date(template: str, day: date) -> str:
    """The template with `day` wherever it asks for today.

    What a model is trained on must not depend on the day on which it is trained.
    """
    return _CLOCK.sub(lambda call: json.dumps(day.strftime(call["form"])), template)
