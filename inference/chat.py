"""Talk to a model in the terminal: `python chat.py --path OUT/step3_ppo/actor`."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.settings import ModelOptions
from pipeline.cli.options import parse_command
from pipeline.config import EMBEDDED
from pipeline.demo.task import TASK_DESCRIPTION
from pipeline.report.results import find_model
from pipeline.settings.fields import read_step_config
from pipeline.system.installation import CHAT


@dataclass(frozen=True, kw_only=True)
class ChatConfig(ModelOptions):
    """Settings of the model and of its sampling."""

    system: str | None = None
    """System message."""

    seed: int | None = None
    """Sampling seed, which makes responses reproducible; null draws a random one."""


def main(argv: Sequence[str]) -> None:
    """Load the model, then chat until the input ends.

    Raises:
        UserError: a setting is wrong, or the path contains no model.
    """
    config = parse_command(
        ChatConfig,
        argv,
        usage=f"{CHAT} --path DIR [--SETTING VALUE ...]",
        about="Talk to a model, using the chat template that was saved with it.",
    )
    sampling = config.sampling(secrets.randbelow(2**31) if config.seed is None else config.seed)

    from inference.conversation import GREETING, Conversation, Terminal
    from pipeline.data.chat.resolve_format import resolve_format
    from pipeline.models.hf.load import load_for_inference
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    path = find_model(config.path, config.method)
    model, tokenizer = load_for_inference(path, precision=config.precision)
    conversation = Conversation(model, tokenizer, resolve_format(tokenizer, "auto"), sampling)
    # Bytes of the command line that are not valid UTF-8 are surrogates.
    conversation.reset(
        (config.system or "").encode(errors="surrogateescape").decode(errors="replace")
    )
    step = read_step_config(Path(path)) or read_step_config(Path(path).parent)  # it wrote the model
    data = step.get("data")
    is_embedded_task = isinstance(data, dict) and data.get("path") == [EMBEDDED]
    greeting = f"{TASK_DESCRIPTION}\n{GREETING}" if is_embedded_task else GREETING
    Terminal(conversation, greeting=greeting).run()
