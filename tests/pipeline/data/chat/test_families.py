"""Chat templates of model families, as TRL stores them: which tokens are trained on."""

import re
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.data.examples import Message
from pipeline.system.errors import DataError
from tests.pipeline.data.chat.test_chat_format import SYSTEM, USER
from tests.pipeline.data.chat.test_templates import DIALOGUE, THOUGHT, make_format, trained_runs

SPEC = find_spec("trl")
assert SPEC is not None
assert SPEC.origin is not None
TOKEN = re.compile(r"<\|[\w▁]+\|?>|<\uff5c.*?\uff5c>|<(?:start|end)_of_turn>|<\w+\|>")
BLUE, RED = Message("assistant", "Blue."), Message("assistant", "Red.")
TURNS = (USER, RED, Message("user", "Sure?"))
EMPTY, CLOSED, FINAL = "<think>\n\n</think>\n\n", "\n</think>\n\n", "<|channel|>final<|message|>"
GLM = "\n<think></think>\n", "\n<think>Weigh it.</think>\nBlue."
INSIDE = THOUGHT.removeprefix("<think>\n")
IM_END, EOS = "<|im_end|>", "<\uff5cend▁of▁sentence\uff5c>"
FAMILIES: dict[str, tuple[str, str, str | None, str | None, str | None]] = {
    "llama3_1": ("<|eot_id|>", "", THOUGHT, "<|eot_id|>", "<|eot_id|>"),
    "qwen2_5": (IM_END, "", THOUGHT, IM_END, IM_END),
    "qwen3": (IM_END, EMPTY, THOUGHT, None, ""),
    "qwen3_5_think": (IM_END, CLOSED, INSIDE, None, IM_END),
    "qwen3_5_nothink": (IM_END, "", None, None, IM_END),
    "qwen3_8": (IM_END, CLOSED, INSIDE, IM_END, IM_END),
    "gemma3": ("<end_of_turn>", "", THOUGHT, "<end_of_turn>", None),
    "gemma4": ("<turn|>", "", THOUGHT, "<turn|>", "<|tool_response>"),
    "phi3_5": ("<|end|>", "", THOUGHT, "<|end|>", None),
    "glm4moe": ("<|user|>", GLM[0], GLM[1], "<|user|>", "<|observation|>"),
    "deepseek_r1_distill": (EOS, CLOSED, INSIDE, None, None),
    "deepseekv3": (EOS, CLOSED, INSIDE, None, None),
    "gptoss": ("<|return|>", FINAL, FINAL + THOUGHT, "", "<|call|>"),
    "lfm2_2_5": (IM_END, "", THOUGHT, IM_END, IM_END),
    "cohere2": ("<|END_RESPONSE|>", "", THOUGHT, "<|END_RESPONSE|>", None),
    "nemotron_3_nano": (IM_END, CLOSED, INSIDE, None, ""),
}
"""By template: the end of a response; what precedes one without thinking; one with thinking, None
if refused; the end of an earlier response, None if not trained; that of a call, None if refused."""


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_tokens_are_the_response_and_its_end(family: str) -> None:
    end, block, thought, earlier, call = FAMILIES[family]
    template = Path(SPEC.origin).parent / "chat_templates" / f"{family}.jinja"
    chat_format = make_format(template.read_text(), *sorted({*TOKEN.findall(template.read_text())}))
    refused = pytest.raises(DataError, match=r"closes the thinking block|tool")

    for prompt in ((USER,), (SYSTEM, USER)):
        assert trained_runs(chat_format, prompt, BLUE) == [f"{block}Blue.{end}"]
    text = str(chat_format.tokenizer.decode(chat_format.encode_prompt((SYSTEM, *TURNS))))
    assert text == chat_format.render((SYSTEM, *TURNS), generation_prompt=True)
    assert SYSTEM.content in text
    observation = chat_format.encode_observation(TURNS[:2], TURNS[2:])
    observed = str(chat_format.tokenizer.decode(observation))
    assert TOKEN.fullmatch(text.rpartition("Red.")[2].removesuffix(observed))
    first = [] if earlier is None else [f"{block}Red.{earlier}"]
    assert trained_runs(chat_format, TURNS, BLUE) == [*first, f"{block}Blue.{end}"]
    with refused if thought is None else nullcontext():
        runs = trained_runs(chat_format, (USER,), Message("assistant", THOUGHT))
        assert runs == [f"{thought}{end}"]
    with refused if call is None else nullcontext():
        *calls, last = trained_runs(chat_format, DIALOGUE, Message("assistant", "Yes."))
        assert last == f"{block}Yes.{end}"
        assert [run.endswith(str(call)) and "Oslo" in run for run in calls] == [True] * bool(call)
