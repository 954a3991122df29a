"""The responses of the model before step 1, for the comparison in the report."""

import logging
from collections.abc import Callable
from typing import TypeVar

from evaluation.held_out import HeldOutPrompts
from evaluation.scored import ScoredResponse
from inference.generation import Response, free_bytes
from pipeline.config import FrozenModelConfig
from pipeline.models.load import add_tokens, load_causal_lm, load_tokenizer
from pipeline.models.meta import model_on_meta
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.system.errors import ModelError
from pipeline.system.memory import available_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")


def responses_of_base(
    held_out: HeldOutPrompts, base: FrozenModelConfig
) -> list[ScoredResponse] | None:
    """Sampled responses of the model before step 1, which is loaded whole on every process.

    None where none is named, where it numbers its tokens in another way than the actor, and where
    it can't be loaded or has no room beside the others: the run itself is done and shall not be
    lost for a comparison, whatever happens.
    """
    if base.path is None:
        return None
    # All processes look before any of them loads, and do the same afterwards.
    seen = _on_all(lambda: _look(held_out, base), base)
    responses = None if seen is None else _on_all(lambda: _respond(held_out, base), base)
    return None if responses is None else held_out.scored(responses)


def _on_all(work: Callable[[], T], base: FrozenModelConfig) -> T | None:
    """What `work`, in which no process needs another, gives; None on all where it fails on one."""
    result, reason = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  # memory that ran out, files that are broken
        reason = str(error).strip().split("\n")[0] or type(error).__name__
    reason = next(filter(None, current_mesh().world.gather_objects(reason)), "")
    if not reason:
        return result
    logger.warning("%s is left out of the comparison: %s", base.path, reason)
    return None


def _look(held_out: HeldOutPrompts, base: FrozenModelConfig) -> bool:
    """Raise ModelError where this process sees that the base can't respond; else True."""
    known = held_out.chat.tokenizer.get_vocab().items()
    if not load_tokenizer(base).get_vocab().items() <= known:
        raise ModelError("it has another tokenizer")
    device = local_device()
    model = model_on_meta(base, task="causal", device=device)
    needed = sum(param.nbytes for param in model.parameters())
    # For a GPU as well it is read in main memory first.
    rooms = {"main memory": available_bytes() // current_mesh().local_size}
    if device.type == "cuda":
        rooms["the GPU"] = free_bytes(device)
    for place, room in rooms.items():
        if needed > room:
            raise ModelError(f"its weights take {needed:,} bytes, and {place} has {room:,} for it")
    return True


def _respond(held_out: HeldOutPrompts, base: FrozenModelConfig) -> list[Response]:
    """Sampled responses of the base to this process's prompts; its memory is given back."""
    model = load_causal_lm(base, device=local_device(), seed=held_out.seed)
    add_tokens(model, held_out.chat.tokenizer, seed=held_out.seed)
    return held_out.respond(model, temperature=held_out.temperature)
