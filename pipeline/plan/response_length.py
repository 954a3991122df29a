"""The default of `max_new_tokens` for rewards from programs, which depends on the model."""

import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.config import DataConfig
from pipeline.data.chat.chat_format import THINK
from pipeline.data.chat.resolve_format import FORMATS
from pipeline.plan.inputs import is_local
from pipeline.system.hub import cached_file, download_settings

ANSWER, THINKING = 1024, 4096
"""Default length of a response with a worked answer, and of one that begins with thinking."""


def default_length(
    model: str, data: DataConfig, *, reserved: int, downloads: bool
) -> tuple[int, str] | None:
    """Return the default response length and a reason, or None if `reserved` fills the context.

    The settings of a Hub model are read if they are cached, or if `downloads` is true.
    """
    if downloads and not is_local(model):
        download_settings(model)

    def read(name: str) -> str:
        path = f"{model}/{name}" if is_local(model) else cached_file(model, name)
        file = Path(path or "").expanduser()
        return file.read_text("utf-8") if file.is_file() else ""

    inline_template = json.loads(read("tokenizer_config.json") or "{}").get("chat_template")
    template = read("chat_template.jinja") or json.dumps(inline_template)
    thinking = data.format not in FORMATS and may_think(template, data.template_args)
    settings = json.loads(read("config.json") or "{}")
    settings = settings.get("text_config", settings)
    room = (settings.get("max_position_embeddings") or 2**31) - reserved
    tokens, reason = (THINKING, "a thinking model") if thinking else (ANSWER, "program rewards")
    if room < tokens:
        tokens, reason = room, f"the context of {model}"
    return (tokens, reason) if room > 0 else None


def may_think(template: str, arguments: Mapping[str, object]) -> bool:
    """Return whether responses may begin with thinking, given a chat template and its arguments."""
    names = ("enable_thinking", "thinking")
    if any(arguments.get(name, f"set {name} = false" not in template) is False for name in names):
        return False
    opens = THINK in template.rpartition("add_generation_prompt")[2]
    return opens or any(name in template for name in ("enable_thinking", "reasoning_effort"))
