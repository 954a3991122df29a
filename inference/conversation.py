"""A dialogue with a model in the terminal."""

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import MemoryHandler
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.sampling import make_sampler
from inference.generation import generate_each
from inference.settings import Sampling
from inference.text import TextStream, printable
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Message
from pipeline.models.forward.forward import context_length
from pipeline.system.errors import DataError, UserError, counted

HELP = """\
/reset           forget the dialogue, keep the system message (also: clear)
/system TEXT     start over with TEXT as the system message, or without one if TEXT is empty
/temperature X   0 is greedy, 1 samples from the model's distribution
/length N        maximum length of a response, in tokens
/save FILE       write the dialogue as a JSON list of messages
/help            show this list
/quit            leave (also: quit, Ctrl-D)
Ctrl-C           stop the response"""

ALIASES = {"clear": "/reset", "quit": "/quit", "exit": "/quit"}
"""Words that act as commands without a slash, as in DeepSpeed-Chat."""


@dataclass(frozen=True)
class TurnResult:
    """Facts about a response, whose text is the last message of the dialogue."""

    num_dropped: int
    """Number of oldest messages that did not fit in the model's context."""

    interrupted: bool
    """Whether Ctrl-C ended the response."""


@dataclass
class Conversation:
    """A dialogue with a model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    chat_format: ChatFormat
    sampling: Sampling
    messages: list[Message] = field(default_factory=list[Message])
    num_responses: int = 0

    def reset(self, system: str | None = None) -> None:
        """Restart the dialogue, with `system` as the system message if given."""
        self.messages = [Message("system", system)] if system else []

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        has_system = self.messages and self.messages[0].role == "system"
        return self.messages[0].content if has_system else None

    def respond(self, text: str, write: Callable[[str], None], *, prefix: str = "") -> TurnResult:
        """Respond to the user's `text`, passing pieces of the response to `write` as they come.

        `prefix` is written first and is not part of the response. A KeyboardInterrupt ends the
        response; the pieces that were already written remain in the dialogue.

        Raises:
            DataError: `text` doesn't fit even without earlier turns; the dialogue is unchanged.
        """
        dialogue = [*self.messages, Message("user", text)]
        num_dropped = 0
        stream = TextStream(self.tokenizer)
        pieces: list[str] = []

        def emit(piece: str) -> None:
            if piece:
                pieces.append(piece)
                write(piece)

        def show_token(_: int, token_ids: list[int]) -> None:
            if token_ids[-1] not in self.chat_format.stop_ids:
                emit(stream.add(token_ids[-1]))

        interrupted = False
        try:
            if prefix:
                write(prefix)
            # Reserve at most half of the context for the response.
            context = context_length(self.model)
            limit = context - min(self.sampling.max_new_tokens, context // 2)
            token_ids, num_dropped = fit_turns(dialogue, self.chat_format.encode_prompt, limit)
            sampling = replace(self.sampling, seed=self.sampling.seed + self.num_responses)
            sampler = make_sampler(sampling, self.chat_format.stop_ids)
            max_tokens = sampling.max_new_tokens
            completions = generate_each(
                self.model, [token_ids], sampler, max_new_tokens=max_tokens, stop_when=show_token
            )
            list(completions)
            emit(stream.finish())
        except KeyboardInterrupt:
            interrupted = True
        self.num_responses += 1
        response = "".join(pieces).strip()
        self.messages = [*dialogue, Message("assistant", response)]
        return TurnResult(num_dropped, interrupted)


def fit_turns(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], max_tokens: int
) -> tuple[list[int], int]:
    """Drop the oldest turns until the remaining messages have at most `max_tokens` tokens.

    A turn is a user message and its response; the system message is kept.

    Returns:
        (token ids, number of messages dropped).

    Raises:
        DataError: the newest message is too long even without earlier turns.
    """
    system = list(messages[:1]) if messages and messages[0].role == "system" else []
    turns = list(messages[len(system) :])
    num_tokens = 0
    for start, message in enumerate(turns):
        if message.role != "user":
            continue
        token_ids = encode([*system, *turns[start:]])
        num_tokens = len(token_ids)
        if num_tokens <= max_tokens:
            return token_ids, start
    raise DataError(
        f"the message has {num_tokens} tokens, but only {max_tokens} fit in the model's context "
        f"with a response; shorten it"
    )


GREETING = "Type a message, or /help. Ctrl-D leaves."


class Terminal:
    """Reads messages and commands from standard input (a terminal or a pipe) until it ends."""

    def __init__(self, conversation: Conversation, *, greeting: str = GREETING) -> None:
        """`greeting` is printed before the first message if standard input is a terminal."""
        self.conversation = conversation
        self.greeting = greeting
        self.is_interactive = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        self._saved: set[Path] = set()

    def run(self) -> None:
        """Chat until the end of the input or /quit."""
        if self.is_interactive:
            # Adds history, line editing and multi-line paste to input().
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
            self.print_line(self.greeting)
        is_running = True
        while is_running:
            try:
                text = self.read()
                is_running = text is not None and self.handle(text)
            except KeyboardInterrupt:  # outside of input()
                if not self.is_interactive:
                    raise
                self.print_line(" [stopped]")

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input."""
        while True:
            try:
                return input("\nYou: " if self.is_interactive else "").strip()
            except EOFError:
                if self.is_interactive:
                    self.print_line("")
                return None
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                self.print_line("\n(Ctrl-D or /quit to leave; the dialogue is kept)")

    def handle(self, text: str) -> bool:
        """Run the command in `text`, or respond to it; return False for /quit."""
        first, _, argument = text.partition(" ")
        # Pasted lines are not a command.
        command = "" if "\n" in text else ALIASES.get(text.lower(), first)
        argument = argument.strip()
        if text and not command.startswith("/"):
            self.respond(text)
        elif command == "/reset":
            self.conversation.reset(self.conversation.system)
            self.print_line("(new dialogue)")
        elif command == "/system":
            self.conversation.reset(argument or None)
            new = "new dialogue with this system message"
            self.print_line(f"({new if argument else 'no system message'})")
        elif command == "/temperature":
            self._set_sampling("temperature", argument, float)
        elif command == "/length":
            self._set_sampling("max_new_tokens", argument, int)
        elif command == "/save":
            self.save(argument)
        elif command == "/help":
            self.print_line(HELP)
        elif text and command != "/quit":
            self.print_line(f"Unknown command {command}; see /help.")
        return command != "/quit"

    def respond(self, text: str) -> None:
        """Print the model's response as it is generated; hold log lines until it ends."""
        with defer_logs():
            try:
                prefix = "Model: " if self.is_interactive else ""
                result = self.conversation.respond(text, self.write, prefix=prefix)
            except UserError as error:
                self.print_line(f"({error})")
                return
            self.print_line(" [stopped]" if result.interrupted else "")
            if result.interrupted and not self.is_interactive:
                raise KeyboardInterrupt
            if result.num_dropped:
                self.print_line(
                    f"(the {result.num_dropped} oldest messages no longer fit in the model's"
                    " context and were dropped)"
                )

    def save(self, text: str) -> None:
        """Write the messages to a file, which must be new or written earlier by this chat."""
        if not text:
            self.print_line("(/save needs a file name)")
            return
        messages = [message.turn for message in self.conversation.messages]
        try:
            path = Path(text).expanduser()
            if path.exists() and path not in self._saved:
                self.print_line(f"({path} exists; choose another name)")
                return
            path.write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except (OSError, RuntimeError) as error:  # RuntimeError: ~name of an unknown user
            self.print_line(f"({text} can't be written: {getattr(error, 'strerror', error)})")
            return
        self._saved.add(path)
        self.print_line(f"(saved {counted(len(messages), 'message')} to {path})")

    def print_line(self, line: str) -> None:
        """Print a line."""
        self.write(line + "\n")

    def write(self, text: str) -> None:
        """Print `text` immediately."""
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def _set_sampling(self, name: str, text: str, kind: type[int] | type[float]) -> None:
        """Set a sampling setting to the number in `text`."""
        try:
            number = kind(text)
            self.conversation.sampling = replace(self.conversation.sampling, **{name: number})  # pyrefly: ignore[bad-argument-type]
        except UserError as error:
            self.print_line(f"({error})")
        except ValueError:
            expected = "an integer" if kind is int else "a number"
            self.print_line(f"({name} must be {expected}, got {text!r})")
        else:
            self.print_line(f"({name} {number})")


@contextmanager
def defer_logs() -> Iterator[None]:
    """Hold log records and warnings until the end of the block, then emit them."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    handlers = {logger: logger.handlers for logger in loggers if logger.handlers}
    for logger, targets in handlers.items():
        # A flush level above that of every record, so that nothing is flushed before the end.
        logger.handlers = [
            MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, target=target)
            for target in targets
        ]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, targets in handlers.items():
            deferred, logger.handlers = logger.handlers, targets
            for handler in deferred:
                handler.close()
