"""What the episodes of a rollout look like, in numbers over all processes."""

from collections.abc import Iterator, Sequence

from inference.generation import Response
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import EpisodeResponse


def episode_statistics(responses: Sequence[Response], config: PPOConfig) -> dict[str, float]:
    """Means over the episodes; empty where responses are no episodes. All processes call it.

    `turns` is the number of the actor's answers, `observation_length` that of tokens between them;
    `ended_by_turns`, `ended_by_tokens` and `ended_by_failure` are the shares that a limit or a
    failure ended. A reward of several parts has the mean of each, over the episodes that have it,
    after the name of its source.
    """
    if config.environment is None:
        return {}
    own = [
        figure
        for response in responses
        if isinstance(response, EpisodeResponse)
        for figure in _figures(response, config)
    ]
    seen: dict[str, list[float]] = {}
    for theirs in current_mesh().data.gather_objects(own):
        for name, value in theirs:
            seen.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(seen.items())}


def _figures(episode: EpisodeResponse, config: PPOConfig) -> Iterator[tuple[str, float]]:
    yield "turns", float(episode.num_turns)
    yield "observation_length", float(episode.observation_length)
    for name, end in (("turns", "turns"), ("tokens", "tokens"), ("failure", "failed")):
        yield f"ended_by_{name}", float(episode.end == end)
    yield from parts_of(episode, config).items()


def parts_of(episode: EpisodeResponse, config: PPOConfig) -> dict[str, float]:
    """The parts of an environment's reward, by the names of their metrics."""
    source = config.environment_source
    name = "" if source is None else source.name
    return {f"reward_{name}_{part}": value for part, value in episode.verdict.parts.items()}
