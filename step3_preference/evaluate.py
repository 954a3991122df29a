"""How the actor does on held-out rows and prompts: loss, order, responses, their judges, the KL."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from evaluation.held_out import HeldOutPrompts, Prompt
from evaluation.in_training import Generating
from evaluation.responding import Chat
from evaluation.scored import ScoredResponse, repeated_trigrams
from inference.generation import Response
from pipeline.config import FrozenModelConfig
from pipeline.data.batches import collate_part, local_micro_batches
from pipeline.data.examples import Encoded
from pipeline.models.chat import decode_response
from pipeline.models.reward_model import score_responses
from pipeline.models.trained import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_preference.config import PreferenceConfig
from step3_preference.objective import Figures, Point, kto_weights, objective
from step3_preference.reference import Reference, Start
from step3_preference.rows import ComparedBatch, Row, cut, response_start


def evaluate_rows(
    rows: Sequence[Row], reference: Reference, config: PreferenceConfig
) -> dict[str, float]:
    """The figures of training, of held-out rows and without gradients, over all processes.

    Where responses come one by one, `accuracy` is the share of pairs of a good and a bad response
    to the same prompt, or where there are none to any prompt, that the log-ratio puts in order.
    """
    passes, engine = reference.start.passes, reference.start.engine
    good = sum(row.chosen is not None for row in rows)
    weights = kto_weights(good, len(rows) - good, config)
    point = Point(reference.z0(rows, first=None), *weights)
    found, values = list[Figures](), dict[int, float]()

    def look(batch: ComparedBatch) -> Tensor:
        assert batch.reference is not None
        logp = batch.rows.sums(engine(batch.tokens).logprobs)
        loss, figures = objective(batch.rows, logp, batch.reference, config, point)
        found.append(figures)
        if config.is_unpaired:
            places = (*batch.rows.chosen, *batch.rows.rejected)
            values.update(zip(places, (logp - batch.reference).tolist(), strict=True))
        return loss

    batches = reference.compared(cut(rows, config), reference.of_held_out)
    with evaluating(engine.model):
        passes.forward(batches, look)
    means = sum(found, Figures.none()).means(passes, len(rows), paired=not config.is_unpaired)
    if config.is_unpaired:
        everyones = current_mesh().data.gather_objects(passes.from_last(values))
        means["accuracy"] = order([{**part} for part in everyones], rows)
    return means


def order(parts: Sequence[Mapping[int, float]], rows: Sequence[Row]) -> float:
    """Share of pairs of a good and a bad response in the right order, ties counted half.

    Args:
        parts: by place of a row its value; each row in one of them.
        rows: responses by themselves.
    """
    values = {place: value for part in parts for place, value in part.items()}
    by_prompt: dict[tuple[int, ...], tuple[list[float], list[float]]] = {}
    for place, row in enumerate(rows):
        side = row.sequences[0]
        prompt = tuple(side.input_ids[: response_start(side)])
        good, bad = by_prompt.setdefault(prompt, ([], []))
        (good if row.chosen is not None else bad).append(values[place])
    groups = [group for group in by_prompt.values() if all(group)]
    if not groups:
        groups = [
            (
                [value for good, _ in by_prompt.values() for value in good],
                [value for _, bad in by_prompt.values() for value in bad],
            )
        ]
    pairs = [(a > b) + 0.5 * (a == b) for good, bad in groups for a in good for b in bad]
    return sum(pairs) / max(1, len(pairs))


class HeldOut(HeldOutPrompts):
    """Prompts that no step trained on; a reward model, where there is one, scores the responses."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        chat: Chat,
        generating: Generating,
        start: Start,
        config: PreferenceConfig,
    ) -> None:
        super().__init__(
            prompts,
            chat,
            generating,
            seed=config.seed,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.generation_batch_size,
        )
        self.start = start
        self.config = config

    def on(self, prompts: Sequence[Prompt]) -> "HeldOut":
        """Other prompts, answered and judged in the same way."""
        return HeldOut(prompts, self.chat, self.generating, self.start, self.config)

    def scored(self, responses: Sequence[Response]) -> list[ScoredResponse]:
        """Text and score of the responses of all processes, in the order of the prompts."""
        texts = [decode_response(self.chat.tokenizer, each.ids) for each in responses]
        scores = self._scores(texts, self.config.reward)
        return self.merged(
            [
                ScoredResponse(text, score, length=len(response.ids), stopped=response.stopped)
                for text, score, response in zip(texts, scores, responses, strict=True)
            ]
        )

    def _scores(self, texts: Sequence[str], reward: FrozenModelConfig) -> Sequence[float | None]:
        if reward.path is None:
            return [None] * len(texts)
        dialogues = [
            (self.prompts[row].messages, text) for row, text in zip(self.rows, texts, strict=True)
        ]
        return score_responses(reward, dialogues)

    def kl(self, responses: Sequence[Response]) -> float:
        """Mean of log pi - log pi_ref summed over a response the actor sampled, in nats."""
        rows = [
            Encoded(
                self.prompts[row].input_ids + response.ids,
                [False] * len(self.prompts[row].input_ids) + [True] * len(response.ids),
            )
            for row, response in zip(self.rows, responses, strict=True)
        ]
        engine = self.start.engine
        with evaluating(engine.model):
            own = self._logp(rows)
        with self.start.applied():
            reference = self._logp(rows)
        # The last processes go round to the first prompts, which count once.
        counted = torch.tensor(self.counted, dtype=torch.float64)
        total, count = self.data.sums(
            [((own - reference) * counted).sum().item(), sum(self.counted)]
        )
        return total / count

    def repetition(self, responses: Sequence[Response]) -> float:
        """Share of the tokens of the actor's responses that end a repeated trigram."""
        counted = [each for each, is_own in zip(responses, self.counted, strict=True) if is_own]
        repeated = sum(repeated_trigrams(each.ids) for each in counted)
        tokens = sum(len(each.ids) for each in counted)
        repeated, tokens = self.data.sums([repeated, tokens])
        return repeated / max(1, tokens)

    def _logp(self, rows: Sequence[Encoded]) -> Tensor:
        """The log-probability of each response of this process."""
        passes, engine, config = self.start.passes, self.start.engine, self.config
        most = config.micro_batch_size * (config.max_prompt_length + config.max_new_tokens)
        found = torch.zeros(len(rows), dtype=torch.float64)
        parts = local_micro_batches([len(row) for row in rows], max_tokens=most)
        batches = [
            collate_part([rows[row] for row in part], spare=rows[0]).to(local_device())
            for part in parts
        ]
        outputs = passes.forward(batches, lambda batch: engine(batch).logprobs)
        for part, logprobs in zip(parts, outputs, strict=False):  # of stages the last has them
            counts = [rows[row].num_targets for row in part]
            each = logprobs.double().cpu().split(counts) if part else ()
            for row, values in zip(part, each, strict=True):
                found[row] = values.sum()
        return passes.from_last(found)

    def by_prompt(self, responses: Sequence[ScoredResponse]) -> dict[str, list[float | None]]:
        """What tells best how good each response is, under its name; empty without a judge.

        The verdicts of the embedded task's program, else the reward model's scores.
        """
        if self.is_verifiable:
            return {"judge": [float(bool(verdict)) for verdict in self.verdicts(responses)]}
        if self.config.reward.path is not None:
            return {"score": [response.score for response in responses]}
        return {}

    def values(self, responses: Sequence[ScoredResponse]) -> list[float | None]:
        """The judge's value of each response; None of each without a judge."""
        return next(iter(self.by_prompt(responses).values()), [None] * len(responses))
