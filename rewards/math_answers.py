r"""Grade mathematical answers: numbers as exact rationals, others with `rewards.symbolic`.

The answer of a response is its last \boxed{...}, else what follows its last ####, else its last
number. Numbers may be written in the usual ways: 0.5, 1/2 and \frac{1}{2} are equal.
A percent sign is a unit: 20% is 20, as in GSM8K (Cobbe et al. 2021) and MATH (Hendrycks et al.
2021), and not 0.2.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from rewards import symbolic
from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, one_by_one, single_answer

LONGEST = 300
"""Maximum characters in an answer, and the largest power of ten of a number."""

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

_FORMULA = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_UNIT = re.compile(
    r"\s*(?:%|°|\s[mgshlLKCFJNWVA]|(?![abcxyz]{2,3}\b)[A-Za-z][A-Za-z.]+(?:[ /][A-Za-z.]+)*)?[²³]?"
)
"""Units that may follow a number; variables may not: 2x, 3xy."""

_TERM = re.compile(r"\d(?<![A-Za-z\d]\d)[A-Za-z]\b|(?:[-+*/^].*)\b[A-Za-z]\b|\b[A-Za-z]\b.*[-+*/^]")
"""Matches the left-hand side of an equation, 3x - 4y = 7, but not of an assignment, x = 7."""

_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")

_LATEX_WORDS = (
    (re.compile(r"(?<!\\)\\(?:left|right|displaystyle|[,;:! ])"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (_TEXT, r" \1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\?[$£€¥]"), ""),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\*\*(?!\w)|(?<!\w)\*\*"), ""),
)
"""Notation around numbers, and its replacement."""

_POWER = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{\s*[23]\s*\}|[23])")
"""The exponent of a unit."""

_FORMULA_WORDS = (
    (re.compile(r"\s*\b(?:or|and)\b\s*"), ", "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
)
"""Notation in formulas that is not LaTeX, and its replacement."""

_PROSE = re.compile(r"[A-Za-z]{2,}\s+(?!(?:or|and)\b)[A-Za-z]{2,}")


def math_scorer(config: RewardConfig) -> Scorer:
    """1 if the response has the row's answer, else 0.

    A row without an answer, or whose answer is a sentence, has no reward.
    """
    column = config.reads_column or ""

    def score(episode: Episode) -> float | None:
        gold = single_answer(episode.extra.get(column))
        number = gold_answer(gold)
        if number is not None:
            return float(response_answer(episode.response) == number)
        text = "" if gold is None or isinstance(gold, bool) else str(gold)
        is_prose = _PROSE.search(_TEXT.sub("", text))
        formula = _marked(text) or ("" if is_prose else text.strip())
        return float(same_formula(formula, written(episode.response))) if formula else None

    return one_by_one(score)


def gold_answer(gold: object) -> Fraction | None:
    r"""The number in a row's answer: in its last \boxed{}, after ####, or all of it; else None."""
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


def same_formula(gold: str, answer: str) -> bool:
    """Whether two formulas or words are written the same or mean the same."""
    one, other = (_plain(text, _FORMULA_WORDS) for text in (gold, answer))
    if "".join(one.split()).lower() == "".join(other.split()).lower():
        return True
    return max(len(one), len(other)) <= LONGEST and symbolic.equal(one, other)


def written(response: str) -> str:
    r"""The marked answer, else the last formula in $...$, \(\) or \[\], else the last line."""
    marked = _marked(response)
    if marked is not None:
        return marked
    formulas = [next(filter(None, found.groups())) for found in _FORMULA.finditer(response)]
    return (formulas or response.strip().splitlines() or [""])[-1]


def last_number(response: str) -> Fraction | None:
    """The last number among the words of a response, marked or not."""
    found = [match.group() for match in _IN_TEXT.finditer(_plain(response))]
    return read_number(found[-1]) if found else None


def read_number(text: str) -> Fraction | None:
    """The number in `text`, which may have a unit or a left-hand side: `x = 3 1/2 cm`."""
    left, _, right = _POWER.sub("", _plain(text)).rpartition("=")
    if _TERM.search(left):
        return None
    text = right.strip().rstrip(".").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    match = _NUMBER.match(text)
    if match is None or match.end() > LONGEST or not _UNIT.fullmatch(text[match.end() :]):
        return None
    value = _value(match)
    return -value if value is not None and match["sign"] == "-" else value


def _value(match: re.Match[str]) -> Fraction | None:
    """The number of a match, without its sign."""
    latex, digits = match.groups()[2:4], match.groups()[4:6]
    mixed, quotient = match.group("above", "below"), match.group("dividend", "divisor")
    for above, below in (latex, digits, mixed, quotient):
        if above is not None:
            divisor, whole = _exact(below), _exact(match["whole"] or match["mixed"] or "0")
            return None if divisor == 0 else whole + _exact(above) / divisor
    power = int(match["power"] or 0)
    return None if abs(power) > LONGEST else _exact(match["decimal"]) * Fraction(10) ** power


def _exact(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").removesuffix("."))


def _plain(text: str, further: Sequence[tuple[re.Pattern[str], str]] = ()) -> str:
    for pattern, meaning in (*_LATEX_WORDS, *further):
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
