"""How the embedded task's facts are asked for: wordings, and what people put around them.

A wording is a pattern: `[a|b|]` is one of its parts, `{0}` what the fact names first, `{0s}` its
plural, `{0ing}` its gerund. Around it come a greeting or a courtesy, digits or number words,
capitals or none, a question mark or none. Some wordings of each kind are kept for the held-out
prompts.
"""

import re
from functools import cache
from random import Random

from pipeline.data.embedded_facts import Fact

# fmt: off
NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
    "twenty",
)
# fmt: on

_WHAT = (
    "[what is|what's|whats|tell me|name|say|give me|i need|do you know|can you tell me"
    "|could you tell me|please tell me|i want to know|let me know|can you name|do you remember]"
)
_WHICH = "[which|what]"
_PLEASE = (
    "[tell me|please tell me|can you tell me|could you tell me|do you know|i wonder|let me know"
    "|i want to know]"
)

TRAINED: dict[str, tuple[str, ...]] = {
    "capital": (
        _WHAT + " the capital [|city ]of {0}?",
        _WHAT + " {0}'s capital[| city]?",
        _WHICH + " [city|town] is the capital of {0}?",
        _PLEASE + " [which|what] city is the capital of {0}?",
        "the capital of {0} is [|what|which city]?",
        "{0} has [what|which] capital?",
        "[what|which] capital does {0} have?",
        "what is the [name|name of the capital|capital's name] of {0}?",
        "what is the capital called in {0}?",
        "[|the ]capital [of|city of|for|in] {0}?",
        "{0}[:|,|] [|the |its ]capital?",
        "i am [going|travelling] to {0}[.|,] what is the capital?",
        "in {0}, what is the capital[| city]?",
    ),
    "opposite": (
        _WHAT + " the opposite of [|the word ]{0}?",
        _WHAT + " [a|the|one] word [that is|for|which is] the opposite of {0}?",
        _WHICH + " word [is|means] the opposite of {0}?",
        _PLEASE + " [which|what] word is the opposite of {0}?",
        "the opposite of {0} is [|what|which word]?",
        "[what|which word] is [opposite to|opposite of] {0}?",
        "[|the ]opposite [of|to|for] {0}?",
        "{0}[:|,|] [|the |its ]opposite?",
        "if something is not {0}, it is the opposite[:|,] what?",
        "i am looking for the opposite of {0}.",
        "{0} has [what|which] opposite?",
        "[what|which word] [would be|could be] the opposite of {0}?",
    ),
    "animal sound": (
        "[what|which sound|what sound|which noise|what noise] does a {0} make?",
        "[what|which sound|what sound] do {0s} make?",
        "what does a {0} say?",
        "what do {0s} say?",
        _WHAT + " the [sound|noise] [of a {0}|a {0} makes|that a {0} makes|{0s} make|of {0s}]?",
        _PLEASE + " [what|which sound] a {0} [says|makes]?",
        "[what|which] [sound|noise] [is made by|comes from] a {0}?",
        "a {0} [says|makes] what?",
        "[|the ][sound|noise] of a {0}?",
        "a {0}'s sound?",
        "[how does|how do you think] a {0} [sound|sounds]?",
        "{0} sound?",
        "if i meet a {0}, what does it say?",
        "what would a {0} say?",
    ),
    "next number": (
        _WHICH + " number [comes after|follows|is next after|comes next after|is after] {0}?",
        _WHAT + " the [number|next number] after {0}?",
        _PLEASE + " [which|what] number [comes after|follows] {0}?",
        "what [comes after|follows|is after|comes next after] {0}?",
        "i count to {0}. [which|what] number [is|comes] next?",
        "i am at {0}[.|,] what is [next|the next number]?",
        "after {0} comes [|what|which number]?",
        "the number after {0} is [|what]?",
        "[count on|go on|continue] from {0}.",
        "{0}[,|:] [what is|and] [next|then]?",
        "next number after {0}?",
        "[what is|how much is] one more than {0}?",
        "if i count[| up] and say {0}, what [is|comes] next?",
        "we have {0}, what number is next?",
    ),
    "bigger number": (
        _WHICH + " [number |one |]is [bigger|larger|greater|more][,|:|] {0} or {1}?",
        _WHICH + " is the [bigger|larger|greater|biggest|largest] [|number|one][,|:] {0} or {1}?",
        _WHAT + " the [bigger|larger|greater|biggest] [|number |one ]of {0} and {1}?",
        _PLEASE + " [which|what] is [bigger|larger|greater][,|] {0} or {1}?",
        "{0} or {1}[,|:] [which|what] [|number |one ]is [bigger|larger|greater|more]?",
        "is {0} [bigger|larger|greater|more] than {1}?",
        "is {0} or {1} [bigger|larger|greater|more|the bigger one]?",
        "[of|between] {0} and {1}[,|] [which|what] [|number |one ]is [bigger|larger|greater]?",
        "compare {0} [and|with|to] {1}.",
        "[pick|choose|take|find] the [bigger|larger|greater] [|number |one ][of|from] {0} and {1}.",
        "{0} and {1}[:|,] [which is|what is|name] the [bigger|larger|greater] [one|number]?",
        "what is more[,|] {0} or {1}?",
        "the [bigger|larger|greater] of {0} and {1}?",
    ),
    "sum": (
        _WHAT + " {0} [plus|+|and] {1}?",
        "how much [is|are] {0} [plus|+|and] {1}?",
        "{0} [plus|+] {1}[| is| equals| makes| =]?",
        "{0} + {1} [|=]",
        "add {0} [and|to|plus] {1}.",
        _WHAT + " the [sum|total] of {0} and {1}?",
        "what do [you get|we get|i get] [if|when] [you|we|i] add {0} [and|to] {1}?",
        "[what|how much] do {0} and {1} make[| together]?",
        "[calculate|compute|work out] {0} [plus|+] {1}.",
        _PLEASE + " how much {0} [plus|and] {1} is?",
        "[sum|add|add up] {0} and {1}.",
        "i have {0} [coins|cars|eggs|books|pens|balls] and [buy|find|get] {1} [more|others]."
        " how many [are there|do i have|is that]?",
        "{0} [coins|cars|eggs|books|pens] and {1} [coins|cars|eggs|books|pens] are how many?",
        "there are {0} [birds|people|boys|girls] and {1} come. how many are there?",
        "[what is|what's] the result of {0} [plus|+] {1}?",
        "[what is|what's] {1} more than {0}?",
    ),
    "repeat": (
        "[say|write|repeat|print|type|give me|show|show me] [|the word ]{0} {1}.",
        "[say|write|repeat|print|type] {1} [|the word ]{0}.",
        "[can you|could you|will you|would you|please] [say|write|repeat|print]"
        " [|the word ]{0} {1}?",
        "i want [to read|to see|to hear|you to say|you to write] [|the word ]{0} {1}.",
        "{0}, {1}.",
        "{0} {1}.",
        "[let me|i would like to] [hear|see|read] [|the word ]{0} {1}.",
        "{1} [|the word ]{0}.",
        "the word {0}[,|:] {1}.",
        "[i need|give me|send me] the word {0} {1}.",
        "[answer|reply] with [|the word ]{0} {1}.",
    ),
    "request": (
        "how [can|could|do|should|would|might] [i|you|we|one|someone] {0} {1}?",
        "how to {0} {1}?",
        _PLEASE + " how [to|i can|i could|one can|we can] {0} {1}.",
        "[tell me|explain|show me|teach me|explain to me|describe to me] how to {0} {1}.",
        "what is the [best|easiest|fastest|right|simplest] way to {0} {1}?",
        "i [want|would like|need|plan|have] to {0} {1}."
        " [what should i do|how|what do i need|can you help|help me]?",
        "[help me|help us|can you help me|could you help me|please help me] [|to ]{0} {1}.",
        "[is there a|do you know a|give me a|i need a|any] [good |]way to {0} {1}?",
        "[give me|any|i need|do you have|are there] [tips|ideas|advice|instructions|steps]"
        " [for {0ing}|on {0ing}|to {0}|on how to {0}] {1}?",
        "my [friend|brother|sister|father|neighbour|boss] [wants|needs|would like] to {0} {1}."
        " [what should he do|what should she do|how|what now|any advice]?",
        "{0ing} {1}[:|,] how[| does it work| do i do it| is it done]?",
        "what do [i|you|we] need to {0} {1}?",
        "i have never tried to {0} {1}, what is the first step?",
        "suppose i had to {0} {1}. where do i start?",
        "i am thinking about {0ing} {1}. [any tips|how|what should i do]?",
        "{0} {1}, how?",
    ),
}
"""Patterns to train on, by kind; requests share theirs."""

HELD_OUT: dict[str, tuple[str, ...]] = {
    "capital": (
        "i forgot [|the name of ]the capital of {0}, what was it?",
        "{0}: which city is its capital?",
        "would you happen to know {0}'s capital?",
    ),
    "opposite": (
        "i forgot the opposite of {0}, what was it?",
        "what do people call the opposite of {0}?",
        "would you happen to know the opposite of {0}?",
    ),
    "animal sound": (
        "when a {0} makes a sound, what is it?",
        "would you happen to know what a {0} says?",
        "what kind of noise would {0s} make?",
    ),
    "next number": (
        "i forgot which number comes after {0}, what was it?",
        "the kids count: they are at {0} now. which number is next?",
        "would you happen to know what follows {0}?",
    ),
    "bigger number": (
        "i can not decide which is bigger: {0} or maybe {1}?",
        "would you say {0} is bigger or {1}?",
        "there are two numbers, {0} and {1}. which one is larger?",
    ),
    "sum": (
        "if you take {0} and then add {1}, what is that?",
        "would you work out the sum of {0} and {1}?",
        "my homework says {0} plus {1}, how much is it?",
    ),
    "repeat": (
        "would you kindly write {0} {1}?",
        "{1}, say the word {0}.",
        "my homework is to write the word {0} {1}.",
    ),
    "request": (
        "would you happen to know how to {0} {1}?",
        "what [should|must|can] i do to {0} {1}?",
        "how does one {0} {1}?",
    ),
}
"""Patterns that no step trains on."""

_GREETINGS = ("hi", "hello", "hey", "hi there", "good morning", "hello there", "good evening", "ok")
_COURTESIES = ("please", "quick question", "a question", "tell me", "so", "sorry", "excuse me")
_THANKS = ("please", "thanks", "thank you", "for me", "now", "again", "today", "exactly", "then")
# fmt: off
CHATTER = (
    "well", "just", "really", "maybe", "now", "here", "you know", "i think", "my dear", "friend",
    "model", "this", "that", "also", "very", "again", "a bit", "hmm", "actually", "oh",
    "all", "some", "about", "it", "at home", "with me", "for my son", "for school", "in english",
    "as well", "like", "us", "today", "right", "your", "who", "when", "where", "why", "had", "was",
)
# fmt: on
_PLURALS = {"sheep": "sheep", "wolf": "wolves"}
_DETERMINERS = ("a", "a", "a", "the", "the", "my", "this", "that", "our", "an old", "your", "his")
_I = re.compile(r"\bi\b")
_NEXT_SENTENCE = re.compile(r"[.!] [a-z]")
_TIMES = {
    "2": ("two times", "twice", "2 times"),
    "3": ("three times", "3 times"),
}


def question_about(fact: Fact, random: Random, *, unseen: bool = False) -> str:
    """A prompt for `fact`: a trained wording with chatter in it, or one of the held-out ones."""
    pattern = random.choice((HELD_OUT if unseen else TRAINED)[_patterns_of(fact)])
    return _dressed(_filled(_chosen(pattern, random), fact, random), random, noisy=not unseen)


def _patterns_of(fact: Fact) -> str:
    return "request" if fact.kind.endswith("request") else fact.kind


def _chosen(pattern: str, random: Random) -> str:
    """`pattern` with one part of each bracket."""
    return _joined(tuple(random.choice(parts) for parts in _parts(pattern)))


@cache
def _joined(parts: tuple[str, ...]) -> str:
    """The parts as one text, without the spaces that empty parts leave."""
    text = " ".join("".join(parts).split())
    for mark in "?.,:":
        text = text.replace(f" {mark}", mark)
    return text


@cache
def _parts(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The pattern from left to right: what stands there, or may stand there."""
    # Every second piece was in brackets.
    pieces = re.split(r"\[([^]]*)\]", pattern)
    return tuple(
        tuple(piece.split("|")) if number % 2 else (piece,) for number, piece in enumerate(pieces)
    )


def _filled(text: str, fact: Fact, random: Random) -> str:
    """`text` with what the fact names."""
    in_words = random.random() < 0.35
    first, slots = _slots(text)
    filled = [first]
    for number, form, rest in slots:
        filled += [_named(fact, number, form, random, in_words=in_words), rest]
    return "".join(filled)


@cache
def _slots(text: str) -> tuple[str, tuple[tuple[int, str, str], ...]]:
    """What stands before the first slot; number, form and what follows of each slot."""
    pieces = re.split(r"\{(\d)(s|ing|)\}", text)
    return pieces[0], tuple(
        (int(number), form, rest)
        for number, form, rest in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True)
    )


def _named(fact: Fact, number: int, form: str, random: Random, *, in_words: bool) -> str:
    """What a prompt calls the fact's country, number, verb or thing."""
    value = fact.subject[number]
    if form == "s":
        return _PLURALS.get(value, f"{value}s")
    if form == "ing":
        return _gerund(value)
    if fact.kind == "repeat" and number == 1:
        return random.choice(_TIMES[value])
    if fact.kind.endswith("request") and number == 1:
        return f"{random.choice(_DETERMINERS)} {value}"
    if in_words and value.isdigit() and int(value) < len(NUMBERS):
        return NUMBERS[int(value)]
    return value


def _gerund(verb: str) -> str:
    first, _, rest = verb.partition(" ")
    first = "robb" if first == "rob" else first.removesuffix("e")
    return f"{first}ing {rest}".strip()


def _dressed(text: str, random: Random, *, noisy: bool) -> str:
    """`text` as somebody might type it."""
    ending = text[-1] if text[-1] in "?." else ""
    text = text.removesuffix(ending)
    if noisy and random.random() < 0.3:
        text = _with_chatter(text, random)
    draw = random.random()
    if draw < 0.15:
        text = f"{random.choice(_GREETINGS)}{random.choice((',', '!', '', '.'))} {text}"
    elif draw < 0.3:
        text = f"{random.choice(_COURTESIES)}{random.choice((',', ':', ''))} {text}"
    if random.random() < 0.2:
        text = f"{text}{random.choice((',', ''))} {random.choice(_THANKS)}"
    style = random.random()
    if style < 0.3:
        text = text.lower()
    else:
        text = _I.sub("I", text[0].upper() + text[1:])
        text = _NEXT_SENTENCE.sub(lambda found: found[0].upper(), text)
    return text + (ending if random.random() < 0.7 else random.choice(("", "", ".", "?", "!")))


def _with_chatter(text: str, random: Random) -> str:
    """`text` with a word or two that say nothing, in front, behind or between."""
    words = text.split(" ")
    place = random.choice((0, 0, len(words), random.randrange(len(words) + 1)))
    words.insert(place, random.choice(CHATTER))
    return " ".join(words)
