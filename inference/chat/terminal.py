"""The chat's terminal: reads messages, runs commands, prints responses as they come.

What is logged meanwhile waits for the end of the response.
"""

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from inference.chat.conversation import Conversation
from inference.streaming import printable
from pipeline.errors import UserError

HELP = """\
/reset           forget the dialogue, keep the system message (also: clear)
/system TEXT     begin again with TEXT as the system message; without TEXT, with none
/temperature X   0 takes the likeliest token, 1 samples as the model says
/length N        longest response, in tokens
/save FILE       write the dialogue as a JSON list of messages
/help            this list
/quit            leave (also: quit, Ctrl-D)
Ctrl-C           stop the response"""

ALIASES = {"clear": "/reset", "quit": "/quit", "exit": "/quit"}
"""Words that are commands when they are the whole line, as in DeepSpeed-Chat."""


class Terminal:
    """Reads from standard input, a terminal or a pipe, until it ends or says /quit."""

    def __init__(self, conversation: Conversation, *, greeting: str = "") -> None:
        """`greeting` is shown to a person before the first prompt."""
        self.conversation = conversation
        self.greeting = greeting
        self.interactive = sys.stdin.isatty()
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self.reset,
            "/system": self.system,
            "/temperature": self.temperature,
            "/length": self.length,
            "/save": self.save,
            "/help": self.help,
        }

    def run(self) -> None:
        """Chat until the end."""
        if self.interactive:
            # Gives input() a history, line editing, and whole pastes.
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
            if self.greeting:
                self.say(self.greeting)
            self.say("Type a message, or /help. Ctrl-D leaves.")
        while self.turn():
            pass

    def turn(self) -> bool:
        """Read a message and do what it asks; False at the chat's end."""
        try:
            text = self.read()
            return text is not None and self.take(text)
        except KeyboardInterrupt:  # in the middle of anything but reading
            if not self.interactive:
                raise
            self.say(" [stopped]")
            return True

    def take(self, text: str) -> bool:
        """Run the command that `text` is, or respond to it; False where the chat is to end."""
        word, _, rest = text.partition(" ")
        word = ALIASES.get(text.lower(), word)
        if "\n" in text:  # was pasted: whatever it begins with, it is a message
            word = ""
        if word == "/quit":
            return False
        if word in self._commands:
            self._commands[word](rest.strip())
        elif word.startswith("/"):
            self.say(f"There is no command {word}; /help lists them.")
        elif text:
            self.respond(text)
        return True

    def read(self) -> str | None:
        """The next message; None at the end of input."""
        while True:
            try:
                return input("\nYou: " if self.interactive else "").strip()
            except EOFError:
                if self.interactive:
                    self.say("")
                return None
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.say("\n(Ctrl-D or /quit leaves; the dialogue is still there)")

    def respond(self, text: str) -> None:
        """Print the model's response as it comes; log lines wait for its end."""
        so_far = len(self.conversation.messages)
        with held_logs():
            try:
                if self.interactive:
                    self.write("Model: ")
                reply = self.conversation.respond(text, self.write)
            except UserError as error:
                self.say(f"({error})")
                return
            except KeyboardInterrupt:  # just before the response began, or just after it ended
                if len(self.conversation.messages) == so_far:
                    self.conversation.leave_unanswered(text)
                raise
            self.say(" [stopped]" if reply.interrupted else "")
            if reply.num_left_out:
                self.say(
                    f"(the {reply.num_left_out} oldest messages no longer fit the model's context"
                    " and were left out)"
                )

    def reset(self, _: str) -> None:
        """Forget the dialogue, keep the system message."""
        self.conversation.reset(self.conversation.system)
        self.say("(new dialogue)")

    def system(self, text: str) -> None:
        """Begin again with a system message, or without one."""
        self.conversation.reset(text or None)
        self.say("(new dialogue with this system message)" if text else "(no system message)")

    def temperature(self, text: str) -> None:
        """Set the temperature."""
        self._change("temperature", text, float)

    def length(self, text: str) -> None:
        """Set the longest response."""
        self._change("max_new_tokens", text, int)

    def save(self, text: str) -> None:
        """Write the messages to a file that isn't there yet, or that this chat wrote."""
        if not text:
            self.say("(/save needs a file name)")
            return
        path = Path(text).expanduser()
        if path.exists() and path not in self._saved:
            self.say(f"({path} exists; choose another name)")
            return
        messages = [
            {"role": message.role, "content": message.content}
            for message in self.conversation.messages
        ]
        try:
            path.write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            self.say(f"({path} can't be written: {error.strerror})")
            return
        self._saved.add(path)
        self.say(f"(saved {len(messages)} messages in {path})")

    def help(self, _: str) -> None:
        """List the commands."""
        self.say(HELP)

    def say(self, line: str) -> None:
        """Print a line."""
        self.write(line + "\n")

    def write(self, text: str) -> None:
        """Print `text` at once."""
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    def _change(self, name: str, text: str, kind: type[int] | type[float]) -> None:
        """Replace one of the sampling settings by the number in `text`."""
        try:
            number = kind(text)
            self.conversation.sampling = dataclasses.replace(
                self.conversation.sampling, **{name: number}
            )
        except UserError as error:
            self.say(f"({error})")
        except ValueError:
            self.say(f"({name} takes {'a whole ' if kind is int else 'a '}number, not {text!r})")
        else:
            self.say(f"({name} {number})")


@contextmanager
def held_logs() -> Iterator[None]:
    """Hold what is logged, warnings included, until the end of the block; then log it."""
    loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]
    talking = {logger: logger.handlers for logger in loggers if logger.handlers}
    for logger, handlers in talking.items():
        # A level that no record has: nothing is let through before the end.
        logger.handlers = [
            MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1, target=handler)
            for handler in handlers
        ]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers in talking.items():
            held, logger.handlers = logger.handlers, handlers
            for handler in held:
                handler.close()
