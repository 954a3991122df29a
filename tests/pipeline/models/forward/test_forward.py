"""Batches of different lengths match plain `transformers` on separate sequences."""

from pathlib import Path

import pytest
import torch

from pipeline.config import FrozenModelConfig
from pipeline.data.batches import TokenBatch, collate
from pipeline.data.examples import Encoded
from pipeline.models.forward.forward import Policy, Scorer, is_ragged
from pipeline.models.hf.load import load_causal_lm, load_classifier
from pipeline.models.parallel.stages import StageModule
from pipeline.system.errors import DataError
from tests.families import (
    FAMILIES,
    RAGGED_FAMILIES,
    TRANSFORMERS,
    UNPACKED,
    WINDOW,
    random_rows,
    save_to,
    tiny_causal_lm,
    tiny_classifier,
)

CPU = torch.device("cpu")
LENGTHS = (7, 3, 12, 5, 1, 6, 6)
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
"""Rounding of fp32 sums; one token too many or too few changes these models' outputs by 0.1."""


def target_logprobs(model: torch.nn.Module, row: Encoded) -> list[float]:
    """Return the plain model's output for one sequence's trained tokens."""
    probabilities = model(input_ids=torch.tensor([row.input_ids])).logits[0].double().softmax(-1)
    return [
        probabilities[position - 1, token].log().item()
        for position, token in enumerate(row.input_ids)
        if row.trained[position] and position > 0
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *UNPACKED])
@torch.no_grad()
def test_logprobs_of_a_batch_match_separate_sequences(family: str, tmp_path: Path) -> None:
    plain = tiny_causal_lm(family)
    rows = random_rows(LENGTHS, prompt=2)

    model = load_causal_lm(FrozenModelConfig(path=save_to(plain, tmp_path)), device=CPU)
    logprobs = Policy(model)(collate(rows)).logprobs

    expected = [logprob for row in rows for logprob in target_logprobs(plain, row)]
    torch.testing.assert_close(logprobs, torch.tensor(expected), **TOLERANCE)
    packed = {*RAGGED_FAMILIES, *(["gptj"] if TRANSFORMERS >= (5, 24) else [])}
    assert is_ragged(model) == (family in packed)


@pytest.mark.parametrize("family", [*RAGGED_FAMILIES, *UNPACKED])
def test_responses_with_a_shared_prompt_match_full_rows(family: str, tmp_path: Path) -> None:
    path = save_to(tiny_causal_lm(family), tmp_path)
    prompt, other_prompt, *responses = random_rows((9, 4, 3, 1, 8, 2))
    rows = [
        Encoded(row_prompt.input_ids + row.input_ids, [False] * len(row_prompt) + [True] * len(row))
        for row_prompt, row in zip([prompt, prompt, prompt, other_prompt], responses, strict=True)
    ]

    def compute(*batches: TokenBatch) -> list[torch.Tensor]:
        model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)
        policy = Policy(model.requires_grad_())
        outputs = [policy(batch, entropy=True) for batch in batches]
        logprobs = torch.cat([output.logprobs for output in outputs])
        torch.cat([logprobs, *(output.entropy for output in outputs)]).sum().backward()
        return [logprobs, *(p.grad for p in model.parameters() if p.grad is not None)]

    separate, shared = compute(*(collate([row]) for row in rows)), compute(collate(rows))

    assert len(shared) > 1
    for got, expected in zip(shared, separate, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_scores_of_a_batch_match_separate_sequences(family: str, tmp_path: Path) -> None:
    plain = tiny_classifier(family)
    rows = random_rows(LENGTHS)

    model = load_classifier(FrozenModelConfig(path=save_to(plain, tmp_path)), device=CPU)
    scores = Scorer(model).final_scores(collate(rows))

    expected = [plain(input_ids=torch.tensor([row.input_ids])).logits.squeeze() for row in rows]
    torch.testing.assert_close(scores, torch.stack(expected), **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
@torch.no_grad()
def test_score_is_read_at_the_last_token_even_if_it_is_padding(family: str) -> None:
    model = tiny_classifier(family)
    pad = model.config.pad_token_id
    rows = [Encoded.untrained([5, 6, 7, pad]), Encoded.untrained([5, pad, pad, pad, pad])]

    scores = Scorer(model).final_scores(collate(rows))

    model.config.pad_token_id = None  # transformers then pools from the last position
    expected = [model(input_ids=torch.tensor([row.input_ids])).logits.squeeze() for row in rows]
    torch.testing.assert_close(scores, torch.stack(expected), **TOLERANCE)


@torch.no_grad()
def test_sliding_window_is_applied(tmp_path: Path) -> None:
    path = save_to(tiny_causal_lm("mistral"), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=CPU)
    (row,) = random_rows((2 * WINDOW + 4,))
    # Two layers attend to 2 * (WINDOW - 1) previous tokens, so not to the first from the last.
    changed = Encoded([row.input_ids[0] ^ 1, *row.input_ids[1:]], row.trained)

    first, second = (Policy(model)(collate([r])).logprobs for r in (row, changed))

    reach = 2 * (WINDOW - 1)
    assert torch.equal(first[reach + 1 :], second[reach + 1 :])
    assert not torch.equal(first[:reach], second[:reach])


@torch.no_grad()
def test_temperature_applies_to_logprobs_and_entropy(tmp_path: Path) -> None:
    plain = tiny_causal_lm("llama")
    model = load_causal_lm(FrozenModelConfig(path=save_to(plain, tmp_path)), device=CPU)
    (row,) = random_rows((6,))

    outputs = Policy(model)(collate([row]), temperature=0.5, entropy=True)

    distribution = torch.distributions.Categorical(
        logits=2 * plain(input_ids=torch.tensor([row.input_ids])).logits[0, :-1]
    )
    targets = torch.tensor(row.input_ids[1:])
    torch.testing.assert_close(outputs.logprobs, distribution.log_prob(targets), **TOLERANCE)
    assert outputs.entropy is not None
    torch.testing.assert_close(outputs.entropy, distribution.entropy(), **TOLERANCE)


@torch.no_grad()
def test_sequence_longer_than_the_context_raises() -> None:
    language, classifier = (make("llama") for make in (tiny_causal_lm, tiny_classifier))
    for model in (language, classifier):
        model.set_attn_implementation("ragged")
    policy, stage = Policy(language, kernels="off"), StageModule(language, kernels="off")
    encoder = tiny_classifier("roberta", max_position_embeddings=67)  # positions start at 3
    fits, too_long = (collate(random_rows((3, length))) for length in (64, 65))

    for run in (policy, policy.logits, Scorer(classifier), stage, Scorer(encoder)):
        run(fits)
        with pytest.raises(DataError, match="has 65 tokens, but the model's context is 64"):
            run(too_long)
