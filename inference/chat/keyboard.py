"""A person's keyboard: whole messages, pasted ones too, and nothing typed shown or lost between.

While the model answers, the terminal doesn't echo. What is typed then waits in the terminal and is
the next message's text. What is pasted is one message: `readline` reads it whole where it knows
bracketed paste; elsewhere, whatever came together with the end of a line belongs to it.
"""

import os
import re
import select
import sys
import termios
from types import TracebackType
from typing import Self

PASTED_WITHIN = 0.05
"""Seconds within which input that follows a line was pasted with it; nobody types so fast."""

END_OF_INPUT = "\x04"
"""Ctrl-D."""

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|O.|.)", re.DOTALL)
"""What arrows, function keys and the marks of a bracketed paste send."""

_OTHER_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Keyboard:
    """The terminal that standard input is, from `with Keyboard() as keyboard` to its end."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno()
        self._usual = termios.tcgetattr(self._file)
        self._ended = False
        self._prefill = ""

    def __enter__(self) -> Self:
        # Gives input() a history and line editing.
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_startup_hook(lambda: readline.insert_text(self._prefill))
        self._be_quiet()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        import readline

        readline.set_startup_hook()
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._usual)

    def message(self, prompt: str) -> str:
        """The next message: a line, or all lines of a paste.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C.
        """
        if self._ended:
            raise EOFError
        lines = [self._line(prompt)]
        while pasted := self._come_already():
            *whole, begun = pasted.split("\n")
            lines += whole
            if begun:  # its end may be missing: it waits, to be changed, for Enter
                self._prefill = begun
                lines.append(self._line("... "))
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._usual)
        try:
            return input(prompt)
        finally:
            self._prefill = ""
            self._be_quiet()

    def _come_already(self) -> str:
        """Text that waits in the terminal, without what keys other than letters send."""
        data = b""
        while not self._ended and select.select([self._file], [], [], PASTED_WITHIN)[0]:
            part = os.read(self._file, 1 << 16)
            data += part
            self._ended = not part
        text = data.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")
        text, ended, _ = _ESCAPES.sub("", text).partition(END_OF_INPUT)
        self._ended |= bool(ended)
        return _OTHER_CONTROLS.sub("", text)

    def _be_quiet(self) -> None:
        """No echo, and what is typed kept as it is, also when Ctrl-C comes."""
        quiet = termios.tcgetattr(self._file)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)
        quiet[3] |= termios.NOFLSH | termios.ISIG
        quiet[6] = [*quiet[6]]
        quiet[6][termios.VMIN], quiet[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._file, termios.TCSADRAIN, quiet)
