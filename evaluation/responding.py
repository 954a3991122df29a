"""Responses of a model to the questions of a task, divided among the processes of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from evaluation.contract import Question
from inference.engine.requests import sample_key
from inference.engine.sampling import sampler_of
from inference.generation import generate_each
from inference.settings import Sampling
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.models.chat import decode_response
from pipeline.models.forward import context_length
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import DataError


@dataclass(frozen=True)
class Chat:
    """How a model's dialogues become tokens, and its tokens text."""

    tokenizer: PreTrainedTokenizerBase
    format: ChatFormat

    def encode(self, questions: Sequence[Question], *, task: str, context: int) -> list[list[int]]:
        """Token ids of the questions to a model that reads `context` tokens.

        Raises:
            DataError: one of them leaves no room for a response.
        """
        encoded = [self.format.encode_prompt(each.messages) for each in questions]
        longest = max(map(len, encoded))
        if longest >= context:
            raise DataError(
                f"the longest prompt of the task {task} has {longest} tokens, and the model reads"
                f" {context}; lower --shots, or leave the task out"
            )
        return encoded


def responses_to(
    questions: Sequence[Question],
    model: PreTrainedModel,
    chat: Chat,
    sampling: Sampling,
    *,
    task: str,
    num_samples: int = 1,
    batch_size: int = 32,
) -> list[list[str]]:
    """`num_samples` responses to each question, the same on any number of processes.

    What is drawn follows from the seed, the number of the question and that of the sample. All
    processes call it; each generates its share, and all get all responses.

    Raises:
        DataError: as `Chat.encode`.
    """
    prompts = chat.encode(questions, task=task, context=context_length(model))
    data = current_mesh().data
    # Every process takes equally many; the last ones go round to the first questions again.
    share = math.ceil(len(prompts) / data.size)
    rows = [(data.rank + number * data.size) % len(prompts) for number in range(share)]
    places = [(row, sample) for row in rows for sample in range(num_samples)]
    finished = generate_each(
        model,
        [prompts[row] for row, _ in places],
        sampler_of(sampling, chat.format.stop_ids),
        max_new_tokens=sampling.max_new_tokens,
        keys=[sample_key(row, sample) for row, sample in places],
        batch_size=batch_size,
    )
    mine = {
        places[each.index]: decode_response(chat.tokenizer, each.response.ids) for each in finished
    }
    merged: dict[tuple[int, int], str] = {}
    for responses in data.gather_objects(mine):
        merged |= responses
    return [[merged[row, sample] for sample in range(num_samples)] for row in range(len(prompts))]
