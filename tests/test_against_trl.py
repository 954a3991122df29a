"""Losses, scores and log-probabilities match TRL's."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.models.forward.forward import Policy, Scorer
from step2_reward.losses import pairwise_loss
from step3_ppo.divergence import generalized_jsd
from step3_preference.config import METHODS, PreferenceConfig
from step3_preference.losses import kto_loss, orpo_loss
from step3_preference.objective import paired_loss
from tests.families import random_rows, tiny_causal_lm, tiny_classifier

pytest.importorskip("trl")


@torch.no_grad()
def test_log_probabilities_and_entropy_match_trl() -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    model = tiny_causal_lm("llama")
    (row,) = random_rows((9,))
    ids = torch.tensor([row.input_ids])

    actual = Policy(model)(collate([row]), temperature=0.7, entropy=True)

    logits = model(input_ids=ids).logits[:, :-1] / 0.7
    expected = selective_log_softmax(logits, ids[:, 1:])
    torch.testing.assert_close(actual.logprobs, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.entropy, entropy_from_logits(logits)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*You are importing from 'trl.experimental'")
@torch.no_grad()
def test_scores_match_trl() -> None:
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
def test_pairwise_loss_matches_trl(center: float | None, with_margin: bool) -> None:
    from accelerate import Accelerator
    from trl import RewardTrainer

    generator = torch.Generator().manual_seed(0)
    scores, margin = torch.randn(8, 1, generator=generator), torch.rand(4, generator=generator)
    inputs = {"attention_mask": torch.ones(8, 3)} | ({"margin": margin} if with_margin else {})
    # The attributes that TRL's method reads from its trainer.
    reward_trainer = SimpleNamespace(
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
        reward_trainer, lambda **_: SimpleNamespace(logits=scores), inputs
    )
    torch.testing.assert_close(loss / 4, expected)


CHOSEN, REJECTED = torch.tensor([-3.0, -9.5, -0.4]), torch.tensor([-4.0, -2.0, -6.0])
"""Log-probabilities of the responses of three pairs."""

REFERENCE = torch.tensor([-3.5, -8.0, -0.5]), torch.tensor([-3.0, -4.0, -5.0])


def make_trainer(**settings: object) -> SimpleNamespace:
    """Return the attributes of the trainer that TRL's losses read."""
    accelerator = SimpleNamespace(gather=_identity, gather_for_metrics=_identity, device="cpu")
    metrics = defaultdict(lambda: defaultdict(list))
    return SimpleNamespace(
        accelerator=accelerator, _metrics=metrics, aux_loss_enabled=False, **settings
    )


def _identity(value: object) -> object:
    return value


def make_outputs(logps: torch.Tensor, tokens: int) -> SimpleNamespace:
    """Return model outputs with each response's log-probability spread evenly over its tokens."""
    token_logps = (logps / tokens)[:, None].expand(-1, tokens)
    zeros = torch.zeros_like(token_logps)
    return SimpleNamespace(
        log_probs=token_logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
    )


@pytest.mark.parametrize("method", ["dpo", "rdpo", "hinge", "ipo", "ldpo"])
def test_losses_with_a_reference_match_trl(method: str) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    name = {"dpo": "sigmoid", "rdpo": "robust", "ldpo": "sigmoid_norm"}.get(method, method)
    config = PreferenceConfig(method="dpo", **METHODS[method])
    tokens = 4
    mask = torch.ones(6, tokens + 1, dtype=torch.long)
    mask[:, 0] = 0  # the prompt
    trainer = make_trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        use_weighting=False,
        model=SimpleNamespace(training=True),
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        **dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), mask),
        "ref_chosen_logps": REFERENCE[0],
        "ref_rejected_logps": REFERENCE[1],
    }
    outputs = make_outputs(torch.cat([CHOSEN, REJECTED]), tokens)

    expected = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)

    scale = tokens if config.is_mean else 1
    loss = paired_loss((CHOSEN - REFERENCE[0]) / scale, (REJECTED - REFERENCE[1]) / scale, config)
    torch.testing.assert_close(loss / 3, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "method"), [("simpo", "simpo"), ("sigmoid", "cpo")])
def test_losses_without_a_reference_match_trl(name: str, method: str) -> None:
    from trl.experimental.cpo import CPOTrainer

    config = PreferenceConfig(method="cpo", **METHODS[method])
    trainer = make_trainer(
        alpha=0.0, loss_type=name, simpo_gamma=config.gamma, beta=config.beta, label_smoothing=0.0
    )

    expected, *_ = CPOTrainer.cpo_loss(trainer, CHOSEN, REJECTED)

    torch.testing.assert_close(
        paired_loss(CHOSEN, REJECTED, config), expected.sum(), rtol=1e-6, atol=1e-6
    )


def test_odds_ratio_loss_matches_trl() -> None:
    from trl.experimental.orpo import ORPOTrainer

    expected, *_ = ORPOTrainer.odds_ratio_loss(make_trainer(beta=0.1), CHOSEN, REJECTED)

    # TRL subtracts it from the negative log-likelihood.
    loss = orpo_loss(CHOSEN, REJECTED, beta=0.1)
    torch.testing.assert_close(loss, -expected.sum(), rtol=1e-6, atol=1e-6)


def test_kto_loss_matches_trl() -> None:
    from trl.trainer.kto_trainer import KTOTrainer

    tokens, kl_logps = 4, torch.tensor([0.5, 1.5, 0.0, 0.25, 0.75, 0.0])
    mask = torch.ones(6, tokens + 1, dtype=torch.long)
    mask[:, 0] = 0
    trainer = make_trainer(
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.1,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        model=SimpleNamespace(training=True),
        _compute_kl_logps=lambda *_: kl_logps,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        **dict.fromkeys(("input_ids", "attention_mask", "completion_mask"), mask),
        "label": torch.tensor([True] * 3 + [False] * 3),
        "ref_logps": torch.cat(REFERENCE),
        "ref_KL_logps": torch.zeros(6),
    }
    outputs = make_outputs(torch.cat([CHOSEN, REJECTED]), tokens)

    expected = KTOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False)

    loss = kto_loss(
        CHOSEN - REFERENCE[0],
        REJECTED - REFERENCE[1],
        beta=0.1,
        z0=0.5,
        weight_good=1.5,
        weight_bad=0.5,
    )
    torch.testing.assert_close(loss / 6, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*You are importing from 'trl.experimental'")
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_divergence_from_teacher_matches_trl(beta: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(0)) * 3

    loss, gradient = generalized_jsd(student.log_softmax(1), teacher.log_softmax(1), beta=beta)

    trl_jsd = GKDTrainer.generalized_jsd_loss
    expected = trl_jsd(student.requires_grad_(), teacher, beta=beta, reduction="none").sum(dim=1)
    expected.sum().backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, student.grad, rtol=1e-5, atol=1e-5)
