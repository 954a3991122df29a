r"""Numeric answers, compared as exact rational numbers.

The answer of a response is its last \boxed{...}, else what follows its last ####, else its last
number. Both sides are read in the ways people write a number, and 0.5, 1/2 and \frac{1}{2} are one.
A percent sign is a unit: 20% is 20, as in GSM8K (Cobbe et al. 2021) and MATH (Hendrycks et al.
2021), and not 0.2.
"""

import re
from fractions import Fraction

from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, one_by_one

LONGEST = 300
"""Maximum characters in a number, and its largest power of ten."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_LATEX = r"\\frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d)\s*(\d))"

_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:
        (?P<whole>\d+)?\s*{_LATEX}
        | (?P<mixed>\d+)\s+(?P<above>\d+)\s*/\s*(?P<below>\d+)
        | (?P<dividend>{_DECIMAL})\s*/\s*(?P<divisor>{_DECIMAL})
        | (?P<decimal>{_DECIMAL})(?:\s*(?:[eE]|(?:\\times|\*|×)\s*10\s*\^)\s*
          (?:\{{\s*)?(?P<power>[-+]?\d+)(?:\s*\}})?)?
    )""",
    re.VERBOSE,
)
_IN_TEXT = re.compile(rf"(?<![\w.])-?(?:{_LATEX}|(?:{_DECIMAL})(?:\s*/\s*(?:{_DECIMAL}))?)")
"""A number in a text; a dot that ends a sentence is not followed by digits."""

_UNIT = re.compile(r"\s*(?:%|°|\s[mgshlLKCFJNWVA]|[A-Za-z][A-Za-z.]+(?:[ /][A-Za-z.]+)*)?[²³]?")
"""Units that may follow a number; a single letter right after it would be a variable: 2x."""

_LATEX_WORDS = (
    (re.compile(r"\\(?:left|right|displaystyle|[,;:! ])"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), "°"),
    (re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{\s*[23]\s*\}|[23])"), ""),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\?[$£€¥]"), ""),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\*\*"), ""),
)
"""Notation around numbers, and its replacement."""


def math_scorer(config: RewardConfig) -> Scorer:
    """1 if the response has the row's answer, else 0.

    A row without an answer, or whose answer is not a rational number, has no reward.
    """
    column = config.reads_column or ""

    def score(episode: Episode) -> float | None:
        gold = gold_answer(episode.extra.get(column))
        return None if gold is None else float(response_answer(episode.response) == gold)

    return one_by_one(score)


def gold_answer(gold: object) -> Fraction | None:
    r"""The answer in a row: a number, its text, or a solution that ends in #### or \boxed{...}.

    None where there is none. A text with several numbers and no mark is none: its last number
    may not be the answer.
    """
    if gold is None or isinstance(gold, bool):
        return None
    text = str(gold)
    return read_number(_marked(text) or text)


def response_answer(response: str) -> Fraction | None:
    """The answer in a response; None if there is none."""
    return last_number(response) if _marked(response) is None else marked_answer(response)


def marked_answer(response: str) -> Fraction | None:
    r"""The number in the last \boxed{...}, else after the last ####; None if there is none."""
    marked = _marked(response)
    return None if marked is None else read_number(marked)


def last_number(response: str) -> Fraction | None:
    """The last number among the words of a response, marked or not."""
    last = None
    for match in _IN_TEXT.finditer(_plain(response)):
        last = match.group()
    return None if last is None else read_number(last)


def read_number(text: str) -> Fraction | None:
    """The number in `text`, which may have a unit or a left-hand side: `x = 3 1/2 cm`."""
    text = _plain(text).rpartition("=")[2].strip().rstrip(".").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    match = _NUMBER.match(text)
    if match is None or match.end() > LONGEST or not _UNIT.fullmatch(text[match.end() :]):
        return None
    value = _value(match)
    return -value if value is not None and match["sign"] == "-" else value


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match, without its sign."""
    above, below, one, other = match.groups()[2:6]
    if above is None:
        above, below = one, other
    if above is not None:
        return _sum(match["whole"] or "0", above, below)
    if match["mixed"] is not None:
        return _sum(match["mixed"], match["above"], match["below"])
    if match["dividend"] is not None:
        return _sum("0", match["dividend"], match["divisor"])
    power = int(match["power"] or 0)
    return None if abs(power) > LONGEST else _exact(match["decimal"]) * Fraction(10) ** power


def _sum(whole: str, above: str, below: str) -> Fraction | None:
    divisor = _exact(below)
    return None if divisor == 0 else _exact(whole) + _exact(above) / divisor


def _exact(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").removesuffix("."))


def _plain(text: str) -> str:
    for pattern, meaning in _LATEX_WORDS:
        text = pattern.sub(meaning, text)
    return text


def _marked(text: str) -> str | None:
    r"""The content of the last \boxed{...}, else the rest of the line after the last ####."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        first = text.index("{", start) + 1
        depth = 1
        for place in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first:place]
        return ""  # never closed: the response was truncated
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None
