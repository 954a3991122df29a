"""Talk to a model in the terminal: `python chat.py --path OUT/step3_ppo/actor`."""

import argparse
import secrets
from collections.abc import Sequence

from inference.settings import add_options, sampling_of
from pipeline.installation import CHAT


def main(argv: Sequence[str]) -> None:
    """Load the model, then chat until the input ends.

    Raises:
        UserError: a wrong setting, or no model at the path.
    """
    options = parse(argv)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    sampling = sampling_of(options, seed=seed)

    from inference.conversation import Conversation
    from inference.terminal import Terminal
    from pipeline.data.chat_format import resolve_format
    from pipeline.models.load import load_for_inference
    from pipeline.run import configure_logging

    configure_logging(is_main=True)
    model, tokenizer = load_for_inference(options.path)
    conversation = Conversation(model, tokenizer, resolve_format(tokenizer, "auto"), sampling)
    conversation.reset(options.system)
    Terminal(conversation).run()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=CHAT, description="Talk to a model with the chat template it was saved with."
    )
    add = parser.add_argument
    add("--path", required=True, help="model directory, such as OUT/step3_ppo/actor, or Hub id")
    add_options(parser, max_new_tokens=128, temperature=0.7)
    add("--system", metavar="TEXT", help="system message")
    add("--seed", type=int, help="makes the answers repeatable; random without it")
    return parser.parse_args(argv)
