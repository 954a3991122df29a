"""Sample an iteration's prompts and responses, and replace groups without a gradient.

Dimension name: B responses of this process.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evaluation.held_out import Prompt, encode_prompts
from inference.engine.requests import Response
from inference.generation import KeyedPrompt, generate
from pipeline.data.batches import RowStream
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.data.sharing.prompts import PromptRecord, draw, fingerprint
from pipeline.data.sharing.steps import is_usable, load_step_rows
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import ConfigError, DataError
from rewards.contract import SourceResults
from step3_ppo.advantages import all_equal
from step3_ppo.config import PPOConfig
from step3_ppo.episodes import OnResponse, run_shared_episodes
from step3_ppo.experience import apply_overlong
from step3_ppo.metrics import episode_statistics
from step3_ppo.models import Models, join_response, sampling_options
from step3_ppo.reward_sources import ResponseSubmitter
from step3_ppo.rewards import compute_raw_scores, compute_rewards

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptBatch:
    """This process's prompts for a rollout, or for some of its groups."""

    groups: list[int]
    """Indices of the prompts' groups in the rollout; group g belongs to process g % W of W."""

    prompts: list[Prompt]
    """The prompt of each response; the identical prompts of a group are adjacent."""

    rows: list[int]
    """Index of each group's prompt among the training prompts."""

    keys: list[int]
    """Sampling key of each response, unique within the run."""

    number: int
    """Number of the batch in the run, the same on all processes."""

    @property
    def inputs(self) -> list[list[int]]:
        """Token ids of each response's prompt."""
        return [prompt.input_ids for prompt in self.prompts]

    @property
    def keyed(self) -> list[KeyedPrompt]:
        """Token ids of each response's prompt, and its key."""
        return list(zip(map(tuple, self.inputs), self.keys, strict=True))


ATTEMPT_GROUPS = 2**40
"""Number of groups with reserved keys for each value of `Prompts.attempt`; no run needs as many."""


@dataclass
class Prompts:
    """Training prompts and held-out prompts."""

    train: list[Prompt]
    held_out: list[Prompt]
    stream: RowStream
    """Row indices of `train`, for one iteration at a time."""

    fingerprint: str
    """Fingerprint of the training prompts' rows."""

    group_size: int
    """Number of responses per prompt."""

    record: PromptRecord
    """Prompts that this step and earlier steps train on or hold out."""

    demonstrations: list[Response] = field(default_factory=list[Response])
    """The data's response to each prompt of `train`, if `uses_demonstrations`; otherwise empty."""

    attempt: int = 0
    """Number of rollbacks; part of the keys, so that different responses are sampled after a
    rollback."""

    def next_batch(self, groups: Sequence[int] | None = None) -> PromptBatch:
        """Draw the stream's next prompts: one per group in `groups`, by default a full rollout.

        A prompt's process depends on its group; its random numbers depend on the prompt's position
        in the stream and on the number of rollbacks.
        """
        groups = range(self.stream.batch_size) if groups is None else groups
        position = self.stream.position
        rows = self.stream.next_rows(len(groups))
        return self._make_batch(rows, groups, position, attempt=self.attempt)

    def peek_batch(self) -> PromptBatch:
        """Return the batch that `next_batch` will return next."""
        position = self.stream.position
        batch = self.next_batch()
        self.stream.position = position
        return batch

    def first_batch(self) -> PromptBatch:
        """Return the prompts of the first iteration without advancing the stream."""
        stream = self.stream
        rows = RowStream(num_rows=stream.num_rows, batch_size=stream.batch_size, seed=stream.seed)
        return self._make_batch(next(rows), range(stream.batch_size), 0, attempt=0)

    @property
    def all_solved(self) -> bool:
        """Whether all training prompts have been dropped as solved."""
        return len(self.stream.dropped) == len(self.train)

    def drop_solved(
        self, batch: PromptBatch, source_rewards: Mapping[str, SourceResults], config: PPOConfig
    ) -> None:
        """Drop the prompts of a batch that the actor solves; all processes must call this."""
        if config.drop_solved is None:
            return
        sources = [(source_rewards[name], maximum) for name, maximum in config.max_rewards.items()]
        solved = [_is_solved(sources, index) for index in range(len(batch.prompts))]
        size = self.group_size
        local_solved = [
            row
            for group, row in enumerate(batch.rows)
            if sum(solved[group * size : (group + 1) * size]) >= config.drop_solved * size
        ]
        self.stream.dropped.update(*current_mesh().data.gather_objects(local_solved))

    def _make_batch(
        self, rows: Sequence[int], groups: Sequence[int], position: int, *, attempt: int
    ) -> PromptBatch:
        size, data = self.group_size, current_mesh().data
        first_key = (attempt * ATTEMPT_GROUPS + position) * size
        local = [i for i, group in enumerate(groups) if group % data.size == data.rank]
        return PromptBatch(
            groups=[groups[i] for i in local],
            prompts=[self.train[rows[i]] for i in local for _ in range(size)],
            rows=[rows[i] for i in local],
            keys=[first_key + i * size + sample for i in local for sample in range(size)],
            number=first_key,
        )


def _is_solved(sources: Sequence[tuple[SourceResults, float]], index: int) -> bool:
    """Return whether every source that applies gives the response its maximum, and none failed."""
    if any(results.failures[index] for results, _ in sources):
        return False
    values = [(results.values[index], maximum) for results, maximum in sources]
    reached = [value >= maximum for value, maximum in values if value is not None]
    return bool(reached) and all(reached)


def load_prompts(chat: ChatFormat, config: PPOConfig) -> Prompts:
    """Read and encode the prompts; those longer than `max_prompt_length` are dropped and counted.

    Raises:
        DataError: no prompt is short enough.
        ConfigError: an iteration has fewer prompts than there are processes.
    """
    processes = current_mesh().data.size
    if config.prompts_per_rollout < processes:
        group_note = f" in groups of {config.group_size}" if config.group_size > 1 else ""
        raise ConfigError(
            f"ppo.rollout_size {config.rollout_size}{group_note} leaves some of the {processes}"
            " processes without a prompt; raise it"
        )
    data = load_step_rows(config, step=3)
    limit, setting = config.max_prompt_length, "ppo.max_prompt_length"
    train = encode_prompts(data.train, chat, limit=limit, name="training", setting=setting)
    held_out = encode_prompts(
        data.eval,
        chat,
        limit=limit,
        name="held-out",
        setting=setting,
        max_prompts=config.data.max_eval_rows,
    )
    return Prompts(
        train=train,
        held_out=held_out,
        stream=RowStream(
            num_rows=len(train), batch_size=config.prompts_per_rollout, seed=config.seed
        ),
        group_size=config.group_size,
        fingerprint=fingerprint(data.train),
        record=data.prompts,
        demonstrations=encode_demonstrations(data.train, train, chat, config),
    )


def encode_demonstrations(
    rows: Sequence[Example], prompts: Sequence[Prompt], chat: ChatFormat, config: PPOConfig
) -> list[Response]:
    """Return the demonstrations in the prompts' rows, or [] unless `uses_demonstrations`.

    A demonstration holds the tokens of the turn after the prompt, as trained on in step 1, but at
    most `max_new_tokens`. It has no log-probabilities, since no model sampled it.

    Raises:
        DataError: a row has no response that step 1 would train on.
    """
    rows_by_prompt = {row.prompt: row for row in rows}
    demonstrations: list[Response] = []
    for prompt in prompts if config.uses_demonstrations else ():
        row = rows_by_prompt[prompt.messages]
        ids: list[int] = []
        if is_usable(row, "demonstrations"):
            encoded = chat.encode(row.prompt, row.chosen, origin=row.origin)
            tokens = zip(encoded.input_ids, encoded.trained, strict=True)
            turn = takewhile(lambda token: token[1], islice(tokens, len(prompt.input_ids), None))
            ids = [token for token, _ in islice(turn, config.max_new_tokens)]
        if not ids:
            raise DataError(
                f"{row.origin}: the row has no response to learn from, which ppo.gkd_lambda"
                f" {config.gkd_lambda:g} requires; add one, remove the row, or set"
                " ppo.gkd_lambda to 1"
            )
        demonstrations.append(Response(ids, stopped=ids[-1] in chat.stop_ids))
    return demonstrations


def generate_responses(
    models: Models,
    prompts: Sequence[Sequence[int]],
    config: PPOConfig,
    *,
    keys: Sequence[int],
    on_response: OnResponse | None = None,
) -> list[Response]:
    """Sample the actor's responses with `keys`, which no other rollout of the run uses.

    `on_response` is called with (prompt index, response) as each response ends.
    """
    options = sampling_options(models.chat, config)
    with models.hybrid_engine.generating() as actor:
        return generate(actor, prompts, keys=keys, on_response=on_response, **options)


def request_next(models: Models, prompts: Prompts, *, is_last: bool) -> None:
    """If other processes generate, request the next rollout from them, unless there is none."""
    if models.remote is not None and not is_last and not prompts.all_solved:
        batch = prompts.peek_batch()
        models.remote.request(models.hybrid_engine, batch.keyed, batch=batch.number)


@dataclass(frozen=True)
class SampledRollout:
    """This process's part of a rollout; the responses to a prompt are adjacent."""

    inputs: list[list[int]]
    """Token ids of the prompts."""

    responses: list[Response]

    metrics: dict[str, float]
    """With `uses_demonstrations`, `on_policy`, 1 if the actor sampled the responses and 0 if not;
    with dynamic sampling, `refills`, the number of replaced prompts; with `drop_solved`,
    `solved_prompts`, the number of dropped prompts; with an environment, the metrics of
    `step3_ppo.metrics.episode_statistics`."""

    source_rewards: dict[str, SourceResults] | None = None
    """The sources' rewards with dynamic sampling or `drop_solved`; otherwise None."""

    score: Float[Tensor, " B"] | None = None
    """The reward model's raw scores if they are already computed; otherwise None."""


def sample_rollout(models: Models, prompts: Prompts, config: PPOConfig) -> SampledRollout:
    """Sample responses to the next prompts, and replace prompts whose rewards are all equal.

    A group with equal rewards has no gradient, so its prompt is replaced with the stream's next
    one, in at most `dynamic_sampling` rounds (Yu et al. 2025, eq. 11). Groups whose rewards are
    still equal after that are kept. All processes replace the same groups, in the same order, so
    the responses don't depend on the number of processes.
    """
    seed, position = config.seed, prompts.stream.position
    batch = prompts.next_batch()
    if config.uses_demonstrations and draw(position, seed=seed, purpose="gkd") >= config.gkd_lambda:
        rows = (row for row in batch.rows for _ in range(config.group_size))
        demonstrations = [prompts.demonstrations[row] for row in rows]
        return SampledRollout(list(batch.inputs), demonstrations, {"on_policy": 0.0})
    inputs, responses = list(batch.inputs), sample_and_submit(models, batch, config)
    origin = {} if models.remote is None else models.remote.metrics()
    if config.dynamic_sampling == 0 and config.drop_solved is None:
        metrics = {"on_policy": 1.0} if config.uses_demonstrations else {}
        metrics |= episode_statistics(responses, config) | origin
        return SampledRollout(inputs, responses, metrics)
    rewards = models.sources.results()
    prompts.drop_solved(batch, rewards, config)
    score = compute_raw_scores(models, inputs, responses, config) if models.reward else None
    sampled = SampledRollout(inputs, responses, {}, rewards, score)
    refills = 0
    for _ in range(config.dynamic_sampling):
        dead = _groups_to_redo(models, sampled, config)
        if not dead or prompts.all_solved:
            break
        refills += len(dead)
        _replace_groups(models, prompts, dead, sampled, config)
    dead = config.dynamic_sampling and _groups_to_redo(models, sampled, config)
    if dead:
        logger.info(
            "the responses to %d of %d prompts still have equal rewards, which give no gradient"
            " (prompts replaced: %d)",
            len(dead),
            config.prompts_per_rollout,
            refills,
        )
    metrics = episode_statistics(responses, config) | origin
    metrics |= {"refills": float(refills)} if config.dynamic_sampling else {}
    if config.drop_solved is not None:
        metrics["solved_prompts"] = float(len(prompts.stream.dropped))
    return replace(sampled, metrics=metrics)


def _replace_groups(
    models: Models,
    prompts: Prompts,
    groups: Sequence[int],
    sampled: SampledRollout,
    config: PPOConfig,
) -> None:
    """Replace these groups of the full rollout, in place, with groups for the next prompts."""
    assert sampled.source_rewards is not None
    batch = prompts.next_batch(groups)
    size, processes = config.group_size, current_mesh().data.size
    rows = [group // processes * size + i for group in batch.groups for i in range(size)]
    new_responses = sample_and_submit(models, batch, config)
    for row, prompt, response in zip(rows, batch.inputs, new_responses, strict=True):
        sampled.inputs[row], sampled.responses[row] = prompt, response
    results = models.sources.results()
    prompts.drop_solved(batch, results, config)
    for name, new_rewards in results.items():
        rewards = sampled.source_rewards[name]
        for index, row in enumerate(rows):
            rewards.values[row] = new_rewards.values[index]
            rewards.failures[row] = new_rewards.failures[index]
    if sampled.score is not None:
        # Scoring is a collective, so a process without new responses rescores an old one.
        rescored = rows or [0]
        inputs = [sampled.inputs[row] for row in rescored]
        responses = [sampled.responses[row] for row in rescored]
        sampled.score[rescored] = compute_raw_scores(models, inputs, responses, config)


def sample_and_submit(models: Models, batch: PromptBatch, config: PPOConfig) -> list[Response]:
    """Sample responses to a batch, and submit each one to the reward programs when it ends."""
    submit = ResponseSubmitter(models.sources, batch.prompts, models.chat)
    return sample_responses(models, batch, config, on_response=submit)


def sample_responses(
    models: Models, batch: PromptBatch, config: PPOConfig, *, on_response: OnResponse | None = None
) -> list[Response]:
    """Sample the actor's responses to a batch, or its episodes, with the batch's keys."""
    if models.remote is not None:
        return models.remote.generate(
            models.hybrid_engine, batch.keyed, batch=batch.number, on_response=on_response
        )
    environments = models.sources.environments
    if environments is None:
        return generate_responses(
            models, batch.inputs, config, keys=batch.keys, on_response=on_response
        )
    with models.hybrid_engine.generating() as actor:
        episodes = run_shared_episodes(
            actor,
            models.chat,
            environments,
            batch.prompts,
            config,
            temperature=config.temperature,
            seed=config.seed,
            keys=batch.keys,
            group_size=config.group_size,
            on_response=on_response,
        )
    return [*episodes]


def find_dead_groups(
    rewards: Float[Tensor, " B"], counted: Bool[Tensor, " B"], *, group_size: int
) -> list[int]:
    """Return the sorted groups of the full rollout whose counted rewards are all equal."""
    data = current_mesh().data
    grouped = rewards.double().view(-1, group_size)
    is_dead = all_equal(grouped, counted.view_as(grouped))[:, 0].tolist()
    local = [i * data.size + data.rank for i, dead in enumerate(is_dead) if dead]
    return sorted(group for groups in data.gather_objects(local) for group in groups)


def _groups_to_redo(models: Models, sampled: SampledRollout, config: PPOConfig) -> list[int]:
    """Return the groups of the full rollout that have no gradient after overlong penalties."""
    responses, device = sampled.responses, local_device()
    stopped = torch.tensor([response.stopped for response in responses], device=device)
    sequences = list(map(join_response, sampled.inputs, responses))
    rewards = compute_rewards(
        models, sampled.score, stopped, config, source_rewards=sampled.source_rewards
    )
    reward, counted = apply_overlong(rewards.reward, sequences, stopped, config)
    return find_dead_groups(reward, counted & rewards.known, group_size=config.group_size)
