"""Log-likelihoods and continuations, against plain transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.likelihoods import TextModel
from tests.families import tiny_causal_lm
from tests.pipeline.data.tokenizers import byte_level

LIMIT = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_level(bos=True)
    tokenizer.save_pretrained(directory)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": LIMIT}
    tiny_causal_lm("llama", **sizes).save_pretrained(directory)
    return directory


@torch.no_grad()
def plain(model: Path, ids: list[int], count: int) -> tuple[float, bool]:
    """Log P of the last `count` of the ids after those before them, of a model that reads LIMIT."""
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = ids[-LIMIT - 1 :]
    logprobs = network(torch.tensor([ids[:-1]])).logits[0, -count:].log_softmax(-1)
    targets = torch.tensor(ids[-count:])
    total = logprobs[torch.arange(count), targets].double().sum().item()
    return total, torch.equal(logprobs.argmax(-1), targets)


PAIRS = [("Human: Hi ", "Hello you"), ("How are", " you?"), ("word " * 40, "so"), ("A", "")]


def test_loglikelihoods_are_those_of_plain_transformers(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = TextModel(str(model), batch_size=2)

    found = asked.loglikelihoods(PAIRS)

    for (context, continuation), (logprob, likeliest) in zip(PAIRS, found, strict=True):
        whole = tokenizer(context + continuation)["input_ids"]
        count = len(whole) - len(tokenizer(context.rstrip())["input_ids"])
        expected = plain(model, whole, count) if count else (0.0, True)
        assert logprob == pytest.approx(expected[0], abs=1e-4)
        assert likeliest == expected[1]


def test_what_the_model_would_say_is_its_likeliest_continuation(model: Path) -> None:
    asked = TextModel(str(model))
    prompt = asked.encode("Human: Hi")
    (answer,) = asked.continuations([("Human: Hi", {"max_gen_toks": 4})])
    following = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0
    )[0, len(prompt) :]

    assert answer == asked.tokenizer.decode(following, skip_special_tokens=True)
    ((_, likeliest),) = asked._scored([(prompt, following.tolist())])
    assert likeliest


def test_a_long_text_is_counted_once_in_windows(model: Path) -> None:
    asked = TextModel(str(model))
    text = "so how are you " * 8
    ids = asked.encode(text)
    assert LIMIT < len(ids) < 2 * LIMIT

    short, long = asked.rolling_loglikelihoods(["Hi there.", text])

    brief = asked.encode("Hi there.")
    assert short == pytest.approx(plain(model, [asked.first, *brief], len(brief))[0], abs=1e-4)
    first = plain(model, [asked.first, *ids[:LIMIT]], LIMIT)[0]
    second = plain(model, ids, len(ids) - LIMIT)[0]
    assert long == pytest.approx(first + second, abs=1e-3)
