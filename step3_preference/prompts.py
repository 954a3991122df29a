"""The held-out prompts that the actor answers."""

import logging
from collections.abc import Sequence

from evaluation.held_out import Prompt
from pipeline.data.chat_format import ChatFormat
from pipeline.data.examples import Example
from pipeline.errors import DataError
from step3_preference.config import PreferenceConfig

logger = logging.getLogger(__name__)


def held_out_prompts(
    examples: Sequence[Example], chat: ChatFormat, config: PreferenceConfig
) -> list[Prompt]:
    """The prompts as token ids; those over `max_prompt_length` are left out, and counted.

    Raises:
        DataError: none is short enough.
    """
    encoded = [
        Prompt(each.prompt, chat.encode_prompt(each.prompt), each.extra) for each in examples
    ]
    short = [each for each in encoded if len(each.input_ids) <= config.max_prompt_length]
    if not short:
        shortest = min(len(each.input_ids) for each in encoded)
        raise DataError(
            f"every held-out prompt is longer than preference.max_prompt_length"
            f" {config.max_prompt_length} (the shortest has {shortest} tokens); raise it"
        )
    if len(short) < len(encoded):
        logger.info(
            "%d of %d held-out prompts are longer than max_prompt_length %d and not answered",
            *(len(encoded) - len(short), len(encoded), config.max_prompt_length),
        )
    return short
