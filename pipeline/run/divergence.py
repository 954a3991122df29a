"""Training that has left the finite numbers ends, says so, and leaves its best weights behind."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from pipeline.config import TrainedModelConfig
from pipeline.engine.best import BestWeights
from pipeline.run.run import Run
from pipeline.system.errors import DivergedError, ModelError

logger = logging.getLogger(__name__)


@contextmanager
def keeping_best(
    run: Run, best: BestWeights, export: Callable[[], object], **trained: TrainedModelConfig
) -> Iterator[None]:
    """Around a step's loop: where it diverges, export the best weights before the run ends.

    Args:
        run: of the step; it notes that it diverged.
        best: the weights to keep.
        export: writes the model to its place; all processes call it.
        trained: settings of the model by their name, for the sentence, which says the rate.

    Raises:
        DivergedError: what went wrong and when, what is kept, what to do.
    """
    try:
        yield
    except DivergedError as error:
        kept = "no weights are exported"
        if best.restore():
            export()
            kept = f"the weights after step {best.step}, the best evaluated, are exported"
        ((name, model),) = trained.items()
        rate = f"{name}.optim.lr is {model.optim.lr:g}"
        if model.lora is not None:
            rate = f"adapters train at a rate of {model.lora_lr:g}, see {name}.lora.lr"
        sentence = f"{run.name} diverged after step {run.step}: {error} ({rate}); {kept}"
        run.note_divergence(sentence)
        raise DivergedError(sentence) from None


def check_start(path: str | None, figures: Mapping[str, float]) -> None:
    """Refuse a model that is broken before any training.

    Raises:
        ModelError: a figure of the first evaluation is infinite or not a number.
    """
    for name, value in figures.items():
        if not math.isfinite(value):
            raise ModelError(
                f"{path}: its {name.replace('_', ' ')} is {value} before any training; its weights"
                " hold infinities or NaN, or overflow in this precision (try fp32)"
            )


def check_finite(where: str, figures: Mapping[str, float]) -> None:
    """End a run whose weights no longer give finite figures.

    Raises:
        DivergedError: a figure is infinite or not a number.
    """
    for name, value in figures.items():
        if not math.isfinite(value):
            raise DivergedError(
                f"{name.replace('_', ' ')} {where} is {value}; lower the learning rate, or train"
                " with precision bf16 or fp32"
            )
