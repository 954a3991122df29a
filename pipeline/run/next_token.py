"""Next-token prediction: the loss, an optimizer step, and the perplexity."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeline.data.batches import TokenBatch
from pipeline.models.passes import B, BatchFn, Passes, evaluating
from pipeline.run.run import Run
from pipeline.run.training import Training

logger = logging.getLogger(__name__)


def train_step(
    passes: Passes,
    batches: Iterable[B],
    run: Run,
    *,
    step: int,
    tokens: int,
    targets: int,
    loss: BatchFn[B] | None = None,
    sums: Mapping[str, Sequence[Tensor]] | None = None,
) -> None:
    """Take one optimizer step on this process's micro-batches, and log it.

    Over all processes, the step's rows contain `tokens` tokens, and `targets` of them are targets.
    `loss` returns a micro-batch's loss summed over its targets, by default the negative
    log-likelihood. It may append other sums, to be logged per target, to the lists in `sums`.
    """
    engine, targets = passes.engine, max(1, targets)
    loss = loss or (lambda batch: -engine(batch.tokens, uniform=True).logprobs.sum())
    losses = passes.forward_backward(batches, loss, divisor=targets)
    result = engine.step()
    totals = {"loss": losses, **(sums or {})}
    run.log(
        step,
        tokens=tokens,
        **{name: run.mesh.data.sum(passes.total(x)) / targets for name, x in totals.items()},
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
        **passes.metrics(),
    )


def perplexity(passes: Passes, batches: Iterable[TokenBatch]) -> float:
    """Compute the perplexity over all processes' target tokens; `batches` are this process's."""
    engine, targets = passes.engine, list[int]()

    def record_targets() -> Iterator[TokenBatch]:
        for batch in batches:
            targets.append(batch.num_targets)
            yield batch

    with evaluating(engine.model):
        losses = passes.forward(record_targets(), lambda batch: -engine(batch).logprobs.sum())
    total_nll, total_targets = engine.group.sums([passes.total(losses), sum(targets)])
    return math.exp(min(total_nll / max(1.0, total_targets), 700.0))


def export_best(training: Training[Any, Any, Any]) -> tuple[float, int]:
    """Export the best weights, or the last ones if none are kept; return (perplexity, step)."""
    best = training.best
    restored = best.restore()
    training.export()
    return (best.value, best.step) if restored else (best.last, best.last_step)


def warn_if_not_improved(training: Training[Any, Any, Any], step: int, before: float) -> None:
    """Warn if the exported weights are those from before training (`step` 0)."""
    if step == 0:
        logger.warning(
            "training did not improve the perplexity (%.4g before, %.4g after), so the initial"
            " weights are exported; lower model.%s (now %g)",
            before,
            training.best.last,
            *training.config.model.peak_lr,
        )
