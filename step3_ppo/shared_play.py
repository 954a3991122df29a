"""Episodes of prompts that several processes have, because each has a part of the models.

Each generates with whole weights by itself, so they share the prompts out, and tell each other what
was played. Whatever an environment says, all learn from the same episodes.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.parallel.mesh import current_mesh
from rewards.environments.pool import Environments
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse, OnResponse, play
from step3_ppo.prompts import Prompt


def play_shared(
    model: nn.Module,
    chat: ChatFormat,
    environments: Environments,
    prompts: Sequence[Prompt],
    config: PPOConfig,
    *,
    keys: Sequence[int],
    group_size: int = 1,
    on_response: OnResponse | None = None,
    **settings: Any,  # noqa: ANN401
) -> list[EpisodeResponse]:
    """`play`, on one process or on those with the same prompts; these all call it.

    With several processes `on_response` is called once all episodes have ended.
    """
    same_rows = current_mesh().parts.apart
    if same_rows.size == 1:
        return play(
            *(model, chat, environments, prompts, config),
            keys=keys,
            group_size=group_size,
            on_response=on_response,
            **settings,
        )
    groups = [
        range(first, min(first + group_size, len(prompts)))
        for first in range(0, len(prompts), group_size)
    ]
    own = [place for group in same_rows.share(groups) for place in group]
    played = play(
        *(model, chat, environments, [prompts[place] for place in own], config),
        keys=[keys[place] for place in own],
        group_size=group_size,
        **settings,
    )
    done: dict[int, EpisodeResponse] = {}
    for theirs in same_rows.gather_objects(dict(zip(own, played, strict=True))):
        done |= theirs
    episodes = [done[place] for place in range(len(prompts))]
    for place, episode in enumerate(episodes):
        if on_response is not None:
            on_response(place, episode)
    return episodes
