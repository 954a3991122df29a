r"""Grade mathematical answers: numbers as exact fractions, others with `rewards.symbolic`.

The answer in a response is its last \boxed{...}, else the text after its last ####, else its last
number. Numbers may be written in the usual ways: 0.5, 1/2 and \frac{1}{2} are equal. A percent sign
is a unit: 20% is 20, not 0.2, as in GSM8K (Cobbe et al. 2021) and MATH (Hendrycks et al. 2021).
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from rewards import symbolic
from rewards.config import RewardConfig
from rewards.contract import Episode, Scorer, per_episode_scorer, single_answer

MAX_LENGTH = 300
"""Maximum number of characters in an answer, and maximum exponent of a power of ten."""

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_FRAC = r"\\frac\s*(?:\{\s*(-?\d+)\s*\}\s*\{\s*(-?\d+)\s*\}|(\d)\s*(\d))"

_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:
        (?P<whole>\d+)?\s*{_FRAC}
        | (?P<integer>\d+)\s+(?P<numerator>\d+)\s*/\s*(?P<denominator>\d+)
        | (?P<dividend>{_DECIMAL})\s*/\s*(?P<divisor>{_DECIMAL})
        | (?P<decimal>{_DECIMAL})(?:\s*(?:[eE]|(?:\\times|\*|×)\s*10\s*\^)\s*
          (?:\{{\s*)?(?P<power>[-+]?\d+)(?:\s*\}})?)?
    )""",
    re.VERBOSE,
)
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\w.])-?(?:(?:\d+ *)?{_FRAC}|\d+ +\d+\s*/\s*\d+|(?:{_DECIMAL})(?:\s*/\s*(?:{_DECIMAL})"
    r"|[eE][-+]?\d+|\s*(?:\\times|\*|×)\s*10\s*\^\s*(?:[-+]?\d+|\{\s*[-+]?\d+\s*\}))?)"
)
"""A number in a text, not preceded by a word character or a dot."""

_FORMULA = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)

_UNIT = re.compile(
    r"\s*(?:%|°|\s[mgshlLKCFJNWVA]|(?![abcxyz]{2,3}\b)[A-Za-z][A-Za-z.]+(?:[ /][A-Za-z.]+)*)?[²³]?"
)
"""Units that may follow a number; variables may not: 2x, 3xy."""

_EQUATION_SIDE = re.compile(
    r"\d(?<![A-Za-z\d]\d)[A-Za-z]\b|(?:[-+*/^].*)\b[A-Za-z]\b|\b[A-Za-z]\b.*[-+*/^]"
)
"""Matches the left-hand side of an equation, 3x - 4y = 7, but not of an assignment, x = 7."""

_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")

_LATEX_REPLACEMENTS = (
    (re.compile(r"(?<!\\)\\(?:left|right|displaystyle|[,;:! ])"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (_TEXT_COMMAND, r" \1"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), "°"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\?[$£€¥]"), ""),
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\*\*(?!\w)|(?<!\w)\*\*"), ""),
)
"""Regular expressions for notation around numbers, with their replacements."""

_UNIT_EXPONENT = re.compile(r"(?<=[A-Za-z])\s*\^\s*(?:\{\s*[23]\s*\}|[23])")
"""The exponent of a unit."""

_FORMULA_REPLACEMENTS = (
    (re.compile(r"\s*\b(?:or|and)\b\s*"), ", "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
)
"""Regular expressions for non-LaTeX notation in formulas, with their replacements."""

_PROSE = re.compile(r"[A-Za-z]{2,}\s+(?!(?:or|and)\b)[A-Za-z]{2,}")


def math_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer that gives 1 if the final answer matches the row's answer, else 0.

    A row without an answer, or whose answer is a sentence, gets no reward.
    """

    def score(episode: Episode) -> float | None:
        gold = single_answer(episode.extra.get(config.resolved_column))
        number = gold_answer(gold)
        if number is not None:
            return float(response_answer(episode.response) == number)
        text = "" if gold is None or isinstance(gold, bool) else str(gold)
        is_prose = _PROSE.search(_TEXT_COMMAND.sub("", text))
        formula = _extract_marked(text) or ("" if is_prose else text.strip())
        return (
            float(is_same_formula(formula, extract_formula(episode.response))) if formula else None
        )

    return per_episode_scorer(score)


def gold_answer(gold: object) -> Fraction | None:
    r"""Return the number in a row's answer: in the last \boxed{}, after ####, or the full text."""
    if gold is None or isinstance(gold, bool):
        return None
    text = str(gold)
    return parse_number(_extract_marked(text) or text)


def response_answer(response: str) -> Fraction | None:
    """Return the number that a response gives as its answer, or None if there is none."""
    return last_number(response) if _extract_marked(response) is None else marked_answer(response)


def marked_answer(response: str) -> Fraction | None:
    r"""Return the number in the last \boxed{...}, else after the last ####, or None if absent."""
    marked = _extract_marked(response)
    return None if marked is None else parse_number(marked)


def is_same_formula(gold: str, answer: str) -> bool:
    """Return whether two formulas or words are the same text or mathematically equivalent."""
    gold, answer = (_normalize(text, _FORMULA_REPLACEMENTS) for text in (gold, answer))
    if "".join(gold.split()).lower() == "".join(answer.split()).lower():
        return True
    return max(len(gold), len(answer)) <= MAX_LENGTH and symbolic.are_equivalent(gold, answer)


def extract_formula(response: str) -> str:
    r"""Return the marked answer, else the last $...$, \(...\) or \[...\], else the last line."""
    marked = _extract_marked(response)
    if marked is not None:
        return marked
    formulas = [next(filter(None, match.groups())) for match in _FORMULA.finditer(response)]
    return (formulas or response.strip().splitlines() or [""])[-1]


def last_number(response: str) -> Fraction | None:
    """Return the last number in a response, marked or not."""
    numbers = [match.group() for match in _NUMBER_IN_TEXT.finditer(_normalize(response))]
    return parse_number(numbers[-1]) if numbers else None


def parse_number(text: str) -> Fraction | None:
    """Parse the number in `text`, which may have a unit or a left-hand side: `x = 3 1/2 cm`."""
    left, _, right = _UNIT_EXPONENT.sub("", _normalize(text)).rpartition("=")
    if _EQUATION_SIDE.search(left):
        return None
    text = right.strip().rstrip(".").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    match = _NUMBER.match(text)
    if match is None or match.end() > MAX_LENGTH or not _UNIT.fullmatch(text[match.end() :]):
        return None
    value = _parse_match(match)
    return -value if value is not None and match["sign"] == "-" else value


def _parse_match(match: re.Match[str]) -> Fraction | None:
    """Return the number in a match, without its sign, or None if undefined or too large."""
    latex, digits = match.groups()[2:4], match.groups()[4:6]
    mixed, quotient = match.group("numerator", "denominator"), match.group("dividend", "divisor")
    for numerator, denominator in (latex, digits, mixed, quotient):
        if numerator is not None:
            divisor = _parse_decimal(denominator)
            whole = _parse_decimal(match["whole"] or match["integer"] or "0")
            return None if divisor == 0 else whole + _parse_decimal(numerator) / divisor
    power = int(match["power"] or 0)
    if abs(power) > MAX_LENGTH:
        return None
    return _parse_decimal(match["decimal"]) * Fraction(10) ** power


def _parse_decimal(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").removesuffix("."))


def _normalize(text: str, extra: Sequence[tuple[re.Pattern[str], str]] = ()) -> str:
    for pattern, replacement in (*_LATEX_REPLACEMENTS, *extra):
        text = pattern.sub(replacement, text)
    return text


def _extract_marked(text: str) -> str | None:
    r"""Return the text in the last \boxed{...}, else the rest of the line after the last ####."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start >= 0:
        start = text.index("{", start) + 1
        depth = 1
        for index in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start:index]
        return ""  # never closed: the response was truncated
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None
