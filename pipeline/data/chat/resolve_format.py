"""Resolve a chat format by name: its template, arguments and date, checked against the tokenizer.

The arguments and the date are saved in the model's template, so that chat, other software and the
next step render a dialogue as in training.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.chat.chat_format import PROBE_PROMPT, PROBE_RESPONSE, ChatFormat
from pipeline.data.chat.encoders import adds_bos
from pipeline.data.examples import Message
from pipeline.system.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Argument = bool | int | float | str

FORMATS: Mapping[str, str] = {
    "human_assistant": r"""{%- for message in messages -%}
  {{- '\n\n' if not loop.first -}}
  {%- if message['role'] == 'system' -%}
    {{- message['content'] | trim -}}
  {%- elif message['role'] == 'user' -%}
    {{- 'Human: ' + message['content'] | trim -}}
  {%- else -%}
    {{- 'Assistant: ' + message['content'] | trim + eos_token -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '\n\nAssistant:' -}}
{%- endif -%}""",
    "chatml": r"""{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
{%- endif -%}""",
    "llama2": r"""{%- set state = namespace(system='') -%}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {%- set state.system = '<<SYS>>\n' + message['content'] | trim + '\n<</SYS>>\n\n' -%}
  {%- elif message['role'] == 'user' -%}
    {{- bos_token -}}
    {{- '[INST] ' + state.system + message['content'] | trim + ' [/INST]' -}}
    {%- set state.system = '' -%}
  {%- else -%}
    {{- ' ' + message['content'] | trim + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}""",
    "llama3": r"""{%- for message in messages -%}
  {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' -}}
  {{- message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}""",
    "plain": r"""{%- for message in messages -%}
  {{- message['content'] +
      {'system': '\n\n', 'user': '', 'assistant': eos_token}[message['role']] -}}
{%- endfor -%}""",
}
"""The Jinja source of each format."""

SPECIAL_TOKENS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""The special tokens that a format needs, if any."""

TODAY = date(2026, 1, 1)
"""Fixed date for templates that request today's date."""
_STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_RESERVED = ("messages", "add_generation_prompt", "tools", "documents")


def set_default_arguments(template: str, arguments: Mapping[str, Argument]) -> str:
    """Return the template with defaults for variables that its caller does not set.

    A template that already has these defaults is returned unchanged.

    Raises:
        ConfigError: a name is not a valid variable, or the template never reads it.
    """
    prefix = ""
    for name, value in arguments.items():
        if not name.isidentifier() or iskeyword(name) or name in _RESERVED:
            raise ConfigError(f"data.template_args {name} is a reserved or invalid name; remove it")
        if unused_names(template, [name]):
            raise ConfigError(
                f"data.template_args {name}: the chat template never reads it; remove it, or check"
                " its spelling"
            )
        literal = (
            str(value).lower() if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
        )
        prefix += f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"
    return template if template.startswith(prefix) else prefix + template


def unused_names(template: str, names: Iterable[str]) -> list[str]:
    """Return the names that the template never reads."""
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", template)]


_PROBE_SYSTEM = Message("system", "Zero.")


def resolve_format(
    tokenizer: "PreTrainedTokenizerBase", name: str, arguments: Mapping[str, Argument] | None = None
) -> ChatFormat:
    """Return the chat format called `name`, for `tokenizer`.

    The name is auto (the tokenizer's own template if it has one, else human_assistant), tokenizer,
    one of `FORMATS`, or a path to a Jinja file. The template stores `arguments`.

    Raises:
        ConfigError: the format does not exist, has no such argument, or has a syntax error.
        ModelError: the tokenizer lacks what the format needs.
        DataError: the template can't be split into prompts and responses.
    """
    if tokenizer.eos_token is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token, so the model could not learn to stop;"
            " set eos_token in its tokenizer_config.json"
        )
    if name == "auto":
        name = "tokenizer" if tokenizer.chat_template else "human_assistant"
    template = _load_template(tokenizer, name)
    # Fix the date that a template requests, so that tokens don't depend on the day.
    template = _STRFTIME_NOW.sub(lambda call: json.dumps(TODAY.strftime(call["format"])), template)
    template = set_default_arguments(template, arguments or {})
    chat_format = ChatFormat(name, template, tokenizer, SPECIAL_TOKENS.get(name, ()))
    chat_format = replace(chat_format, system_slot=_has_system_slot(chat_format))
    text = chat_format.render(PROBE_PROMPT, generation_prompt=True)
    if adds_bos(tokenizer) and not text.lstrip().startswith(str(tokenizer.bos_token)):
        chat_format = replace(chat_format, template="{{- bos_token }}" + chat_format.template)
    text = "".join(part.text for part in chat_format.segments((*PROBE_PROMPT, PROBE_RESPONSE)))
    if not all(turn.content in text for turn in (*PROBE_PROMPT, PROBE_RESPONSE)):
        raise DataError(
            f"{chat_format.title} omits the text of some turns, perhaps because it expects content"
            " in parts (images and text); choose another --format"
        )
    return chat_format


def _load_template(tokenizer: "PreTrainedTokenizerBase", name: str) -> str:
    """Return the Jinja source of a named format."""
    if name in FORMATS:
        return FORMATS[name]
    if name == "tokenizer":
        if not tokenizer.chat_template:
            raise ModelError(
                "--format tokenizer: the tokenizer has no chat template; choose"
                f" {', '.join(FORMATS)} or a Jinja file"
            )
        try:
            return tokenizer.get_chat_template()
        except ValueError as error:
            names = ", ".join(tokenizer.chat_template)
            raise ModelError(
                f"the tokenizer has the chat templates {names}, but none is called default; save"
                " one as the tokenizer's chat_template.jinja, or pass a Jinja file with --format"
            ) from error
    try:
        return Path(name).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"--format {name} is not UTF-8 text; save it as UTF-8") from None
    except OSError:
        raise ConfigError(
            f"--format {name} is neither a Jinja file nor one of auto, tokenizer,"
            f" {', '.join(FORMATS)}"
        ) from None


def _has_system_slot(chat_format: ChatFormat) -> bool:
    """Return whether a dialogue with a system message can be split without losing the message."""
    dialogue = (_PROBE_SYSTEM, *PROBE_PROMPT, PROBE_RESPONSE)
    with suppress(DataError):
        return any(_PROBE_SYSTEM.content in part.text for part in chat_format.segments(dialogue))
    return False
