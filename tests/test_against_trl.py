"""Where TRL has the same function, it gives the same numbers."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.kernels.logprobs.definition import categorical_entropy
from pipeline.models.forward import Policy, Scorer
from step2_reward.losses.pairs import pairwise_loss
from tests.families import random_rows, tiny_causal_lm, tiny_classifier

pytest.importorskip("trl")


@torch.no_grad()
def test_log_probabilities_and_entropy_are_trls() -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    model = tiny_causal_lm("llama")
    (row,) = random_rows((9,))
    ids = torch.tensor([row.input_ids])

    said = Policy(model)(collate([row]), temperature=0.7, entropy=True)

    logits = model(input_ids=ids).logits[:, :-1] / 0.7
    expected = selective_log_softmax(logits, ids[:, 1:])
    torch.testing.assert_close(said.logprobs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(said.entropy, entropy_from_logits(logits)[0], rtol=1e-5, atol=1e-5)
    entropy = categorical_entropy(logits[0].log_softmax(dim=-1))
    torch.testing.assert_close(entropy, entropy_from_logits(logits[0]))


@pytest.mark.filterwarnings("ignore:.*You are importing from 'trl.experimental'")
@torch.no_grad()
def test_scores_are_trls() -> None:
    from trl.experimental.utils import get_reward

    model = tiny_classifier("llama")
    prompts, responses = (
        [row.input_ids for row in random_rows(n, seed=s)]
        for n, s in (((4, 4, 4), 1), ((5, 2, 3), 2))
    )
    pad = model.config.pad_token_id
    padded = [p + r + [pad] * (6 - len(r)) for p, r in zip(prompts, responses, strict=True)]

    scores = Scorer(model).final_scores(
        collate([Encoded.untrained(p + r) for p, r in zip(prompts, responses, strict=True)])
    )

    _, expected, _ = get_reward(model, torch.tensor(padded), pad, context_length=4)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("center", [None, 0.1])
@pytest.mark.parametrize("with_margin", [False, True])
def test_the_pairwise_loss_is_trls(center: float | None, with_margin: bool) -> None:
    from accelerate import Accelerator
    from trl import RewardTrainer

    generator = torch.Generator().manual_seed(0)
    scores, margin = torch.randn(8, 1, generator=generator), torch.rand(4, generator=generator)
    inputs = {"attention_mask": torch.ones(8, 3)} | ({"margin": margin} if with_margin else {})
    # What TRL's method reads of its trainer.
    trainer = SimpleNamespace(
        model=torch.nn.Identity(),
        args=SimpleNamespace(center_rewards_coefficient=center),
        accelerator=Accelerator(cpu=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )

    loss = pairwise_loss(
        scores[:4, 0],
        scores[4:, 0],
        margin=margin if with_margin else None,
        center_coef=center or 0.0,
    )

    expected = RewardTrainer.compute_loss(
        trainer, lambda **_: SimpleNamespace(logits=scores), inputs
    )
    torch.testing.assert_close(loss / 4, expected)
