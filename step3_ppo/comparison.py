"""The actor's two sets of answers to the held-out prompts."""

from evaluation.answers import Answers
from step3_ppo.evaluate import HeldOut


def answer_all(held_out: HeldOut, *, strict: bool = False) -> Answers:
    """Let the actor, as it is now, answer the held-out prompts.

    Raises:
        RewardError: with `strict`, where rewards fail.
    """
    with held_out.generating() as actor:
        sampled = held_out.respond(actor, temperature=held_out.config.temperature)
        greedy = held_out.respond(actor, temperature=0.0)
    return Answers(
        greedy=held_out.answers(greedy, strict=strict),
        sampled=held_out.answers(sampled, strict=strict),
        kl=held_out.kl(sampled),
    )
