"""Step 0: continued pre-training on text.

python -m step0_pretrain.train --model.path DIR --data.path c.tokens
torchrun --nproc_per_node 2 -m step0_pretrain.train --config configs/opt-125m.yaml \
    --data.path c.tokens
"""

from pipeline.cli.options import prepare_imports
from step0_pretrain.config import PretrainConfig

if __name__ == "__main__":
    prepare_imports(PretrainConfig)

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.cli.options import run_main
from pipeline.data.batches import TokenBatch
from pipeline.data.store.rows import TokenRow
from pipeline.models.hf.load import load_tokenizer
from pipeline.models.passes import make_policy
from pipeline.models.trained import limit_to_context
from pipeline.parallel.mesh import current_mesh
from pipeline.run.next_token import export_best, perplexity, train_step, warn_if_not_improved
from pipeline.run.run import Run
from pipeline.run.training import (
    Training,
    check_finite,
    check_initial_metrics,
    exporting_best,
    run_step,
    set_up,
)
from pipeline.system.torch_process import seed_generators
from step0_pretrain.rows import Rows, collate, load_rows, split_rows
from step0_pretrain.warm_start import warm_start

logger = logging.getLogger(__name__)

Pretraining = Training[PretrainConfig, TokenRow, Rows]


def train(config: PretrainConfig) -> Path:
    """Train the model on the corpus; return the directory of the exported model."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    config = limit_to_context(config, config.model)
    rows = load_rows(config, load_tokenizer(config.model))
    with Run(config, name="step0_pretrain", total_steps=rows.total_steps, mesh=mesh) as run:
        lm = load_model(config, rows, run)
        passes, best = lm.passes, lm.best
        before = lm.checkpoints.once("before", lambda: perplexity(passes, held_out_batches(lm)))
        check_initial_metrics(config.model.path, {"held-out perplexity": before})
        if lm.checkpoints.done == 0:
            best.update(before, step=0)
            run.log_eval(0, {"perplexity": before})
        with exporting_best(run, best, lm.export, model=config.model):
            for step in lm.checkpoints.steps():
                take_step(lm, rows.corpus.next_rows(), run, step=step)
                if lm.evaluates_after(step):
                    best.update(perplexity(passes, held_out_batches(lm)), step=step)
                    run.log_eval(step, {"perplexity": best.last})
                    check_finite(f"after step {step}", {"held-out perplexity": best.last})
        finish(lm, run, before=before)
    return config.output_dir


def load_model(config: PretrainConfig, rows: Rows, run: Run) -> Pretraining:
    """Load the model into its engine, and restore the run's state if it is resumed."""
    for note in rows.corpus.notes:
        logger.info("data for step 0: %s", note)
    model, passes = make_policy(
        config.model,
        rows.tokenizer,
        config.parallel,
        run.mesh,
        total_steps=rows.total_steps,
        seed=config.seed,
        name="model",
    )
    held_out = rows.corpus.eval_rows
    lm = set_up(config, model, passes.engine, rows, held_out, run, passes=passes)
    if config.warm_start is not None and lm.checkpoints.is_new:
        warm_start(passes.engine, config.warm_start, run.mesh.world)
    return lm


def take_step(lm: Pretraining, rows: Sequence[TokenRow], run: Run, *, step: int) -> None:
    """Take one optimizer step on the rows, excluding held-out documents, and log it."""
    is_held_out = lm.rows.corpus.held_out.contains
    parts = [[row.without(is_held_out) for row in part] for part in split_rows(rows, lm.config)]
    local = [row for part in parts for row in part]
    tokens, targets = run.mesh.data.sums(
        [sum(map(len, local)), sum(row.num_targets for row in local)]
    )
    train_step(
        lm.passes,
        iter_batches(lm, parts),
        run,
        step=step,
        tokens=int(tokens),
        targets=int(targets),
    )


def held_out_batches(lm: Pretraining) -> Iterator[TokenBatch]:
    """Return this process's micro-batches of the held-out rows."""
    return iter_batches(lm, split_rows(lm.held_out, lm.config))


def iter_batches(lm: Pretraining, parts: Sequence[Sequence[TokenRow]]) -> Iterator[TokenBatch]:
    """Return an iterator that collates the micro-batches one at a time."""
    return (collate(part, spare=lm.held_out[0]) for part in parts)


def finish(lm: Pretraining, run: Run, *, before: float) -> None:
    """Export the best weights and write the result; `before` is the initial perplexity."""
    after, step = export_best(lm)
    run.finish(
        eval={
            "perplexity_before": before,
            "perplexity_after": after,
            "best_step": step,
            "held_out_tokens": sum(map(len, lm.held_out)),
        },
    )
    warn_if_not_improved(lm, step, before)


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(PretrainConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
