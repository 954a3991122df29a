"""Groups of several responses per prompt, without a critic."""

from pathlib import Path

import torch

from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.rewards import score_to_reward
from step3_ppo.rollout import generate_responses
from tests.step3_ppo.toy import PROMPTS, toy_config, toy_models


def test_group_responses_differ_and_share_their_prompt(toy: Path) -> None:
    config = toy_config(toy, advantage="grpo", group_size=4)
    models = toy_models(config)
    prompts = [PROMPTS[0]] * 4 + [PROMPTS[1]] * 4

    responses = generate_responses(models, prompts, config, keys=range(8))
    experience = score_responses(models, prompts, responses, config)
    score = score_to_reward(experience.score, experience.stopped, models, config)
    rollout = compute_advantages(experience, score, config, kl_coef=0.0)

    num_tokens = sum(map(len, experience.sequences))
    shared = rollout.micro_batch(range(8)).tokens
    assert shared.num_tokens == num_tokens - 3 * len(PROMPTS[0]) - 3 * len(PROMPTS[1])
    separate = [models.actor(rollout.micro_batch([row]).tokens).logprobs for row in range(8)]
    logprobs = experience.logprobs[experience.mask]
    torch.testing.assert_close(logprobs, torch.cat(separate), rtol=0, atol=1e-5)

    assert len({tuple(response.ids) for response in responses[:4]}) > 1
    advantages = rollout.advantages[:, 0].view(2, 4)  # all tokens have the response's advantage
    torch.testing.assert_close(advantages.sum(dim=1), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        advantages.argmax(dim=1), rollout.reward_score.view(2, 4).argmax(dim=1)
    )
