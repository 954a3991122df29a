"""Talk to a model in the terminal: `python chat.py --path OUT/step3_ppo/actor`."""

import argparse
import secrets
from collections.abc import Sequence
from pathlib import Path

from inference.settings import add_options, sampling_of
from pipeline.config import EMBEDDED
from pipeline.data.embedded_talk import TAUGHT
from pipeline.installation import CHAT
from pipeline.report.find_model import find_model

CHAT_TEMPERATURE = 0.7
"""Of the answers, where the command line names no other."""


def main(argv: Sequence[str]) -> None:
    """Load the model, then chat until the input ends.

    Raises:
        UserError: a wrong setting, or no model at the path.
    """
    options = parse(argv)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    sampling = sampling_of(options, seed=seed)

    from inference.chat.conversation import Conversation
    from inference.chat.terminal import Terminal
    from pipeline.data.resolve_format import resolve_format
    from pipeline.logs import configure_logging
    from pipeline.models.load import load_for_inference

    configure_logging(is_main=True)
    path = find_model(options.path, options.method)
    model, tokenizer = load_for_inference(path)
    conversation = Conversation(model, tokenizer, resolve_format(tokenizer, "auto"), sampling)
    conversation.reset(options.system)
    Terminal(conversation, greeting=TAUGHT if taught_embedded_task(path) else "").run()


def taught_embedded_task(path: str) -> bool:
    """Whether the model at `path` lies where a step left it that trained on the embedded task."""
    import yaml

    for settings in (Path(path) / "config.yaml", Path(path).parent / "config.yaml"):
        try:
            known = yaml.safe_load(settings.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue
        data = known.get("data") if isinstance(known, dict) else None
        return isinstance(data, dict) and data.get("path") == [EMBEDDED]
    return False


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=CHAT, description="Talk to a model with the chat template it was saved with."
    )
    add = parser.add_argument
    add(
        "--path",
        required=True,
        help="model directory, such as OUT/step3_ppo/actor, a run's output directory, or Hub id",
    )
    add("--method", help="of a run's output directory the model of this method: ppo, grpo, ...")
    add_options(parser, max_new_tokens=128, temperature=CHAT_TEMPERATURE)
    add("--system", metavar="TEXT", help="system message")
    add("--seed", type=int, help="makes the answers repeatable; random without it")
    return parser.parse_args(argv)
