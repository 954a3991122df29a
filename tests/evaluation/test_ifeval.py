"""Every kind of instruction, with texts that do and don't follow it."""

import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.contract import ReadOptions
from evaluation.ifeval import INSTRUCTIONS, follows, grade_ifeval, read_ifeval, variants

CASES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "keywords:existence": [({"keywords": ["Frog", "pond"]}, "A frog in its pond.", "A frog.")],
    "keywords:frequency": [
        ({"keyword": "so", "frequency": 2, "relation": "at least"}, "So and so", "so it is")
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["cat"]}, "Concatenate.", "A Cat!")],
    "keywords:letter_frequency": [
        ({"letter": "e", "let_frequency": 3, "let_relation": "at least"}, "Eerie", "here")
    ],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "less than"}, "ONE-A two", "DON'T")
    ],
    "change_case:english_capital": [({}, "ALL OF IT: 3!", "ALLES IST DA UND DER HUND NICHT.")],
    "change_case:english_lowercase": [({}, "all of it: 3!", "all Of it")],
    "punctuation:no_comma": [({}, "One and two.", "One, two.")],
    "language:response_language": [
        ({"language": "de"}, "Der Hund ist nicht im Haus.", "The dog is not in the house."),
        ({"language": "es"}, "El perro no es de la casa.", "O cão não é uma casa do rei."),
        ({"language": "ru"}, "Это не мой дом и не твой.", "Тази къща и онази \u0435 тук."),
        ({"language": "fa"}, "این کتاب را برای او خواندم که", "هذا الكتاب على الطاولة"),
        ({"language": "th"}, "สวัสดีครับ", "Sawatdee khrap"),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": "at least"}, "One. Two!", '"Only Dr. J. Smith came."'),
        ({"num_sentences": 3, "relation": "at least"}, "1. Eat.\n2. Go.", "1. eat... well. So"),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": "at least"}, "Don't go", "Go now")
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "One.\n\n***\n\nTwo.", "One.\n***\nTwo.\n***\nThree.")
    ],
    "length_constraints:nth_paragraph_first_word": [
        (
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
            "First it rained.\n\nThen, sun.",
            "Then it rained.\n\nSun.",
        )
    ],
    "detectable_content:number_placeholders": [
        ({"num_placeholders": 2}, "Dear [name], of [town]", "Dear [name], of [\n]")
    ],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye.\nP.S. Write!", "Bye. PSA."),
        ({"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. Write!", "Bye.\nP.S. Write!"),
    ],
    "detectable_format:number_bullet_lists": [
        ({"num_bullets": 2}, "Two:\n* one\n- two", "Two:\n* one\n**two**")
    ],
    "detectable_format:constrained_response": [({}, "My answer is maybe.", "my answer is yes.")],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", "*one* and 2 * 3")
    ],
    "detectable_format:multiple_sections": [
        (
            {"section_spliter": "Section", "num_sections": 2},
            "Section 1\nA, as in Section 2",
            "Section 1\nA\nsection 2\nB",
        )
    ],
    "detectable_format:json_format": [({}, '```json\n{"a": 1}\n```', '{"a": 1}, as you see')],
    "detectable_format:title": [({}, "<<A frog>>\nOnce", "<A frog>\nOnce")],
    "combination:two_responses": [({}, "One.\n******\nTwo.", "One.\n******\nOne.")],
    "combination:repeat_prompt": [
        ({"prompt_to_repeat": "What is it?"}, "What is it? A frog.", "A frog. What is it?")
    ],
    "startend:end_checker": [
        ({"end_phrase": "Any questions?"}, 'So it is. Any questions?"', "Any questions? No.")
    ],
    "startend:quotation": [({}, '"All of it."', '"Part" of it.')],
}


@pytest.mark.parametrize("name", CASES)
def test_instruction_check_separates_following_from_violating_texts(name: str) -> None:
    for arguments, following, violating in CASES[name]:
        INSTRUCTIONS[name].check(arguments, name)
        assert follows(following, name, arguments), following
        assert not follows(violating, name, arguments), violating
        assert not follows("  \n", name, arguments)


def test_loose_grade_ignores_surrounding_lines_and_asterisks(tmp_path: Path) -> None:
    names, kwargs = ["startend:quotation", "punctuation:no_comma"], [{}, {"num_words": None}]
    row = {"key": 1, "prompt": "Be brief.", "instruction_id_list": names, "kwargs": kwargs}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (question,) = read_ifeval(ReadOptions(path=str(tmp_path / "rows.jsonl")))

    grades = grade_ifeval(question, 'Sure:\n**"It is so"**')

    assert grades == {
        "prompt_strict": (False,),
        "instruction_strict": [False, True],
        "prompt_loose": (True,),
        "instruction_loose": [True, True],
    }
    assert list(variants("a*\nb\nc")) == ["a*\nb\nc", "a\nb\nc", "b\nc", "b\nc", "a*\nb", "a\nb",
                                          "b", "b"]  # fmt: skip
