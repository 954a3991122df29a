"""Step 1: supervised fine-tuning of the actor on demonstrations.

python -m step1_sft.train --config configs/opt-125m.yaml
torchrun --nproc_per_node 2 -m step1_sft.train --config configs/opt-125m.yaml
"""

from pipeline.cli.options import prepare_imports
from step1_sft.config import SFTConfig

if __name__ == "__main__":
    prepare_imports(SFTConfig)

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from evaluation.evaluate import TaskEvaluations
from inference.hybrid_engine import HybridEngine
from pipeline.cli.options import run_main
from pipeline.data.batches import TokenBatch
from pipeline.data.examples import Encoded
from pipeline.models.hf.export import set_stop_tokens
from pipeline.models.passes import make_policy
from pipeline.models.trained import limit_to_context
from pipeline.parallel.mesh import current_mesh
from pipeline.run.next_token import export_best, perplexity, train_step, warn_if_not_improved
from pipeline.run.run import Run
from pipeline.run.training import (
    Rows,
    Training,
    check_finite,
    check_initial_metrics,
    check_rows,
    exporting_best,
    load_rows,
    run_step,
    set_up,
)
from pipeline.system.torch_process import seed_generators
from step1_sft.batches import encode, make_fit_check, split_rows
from step1_sft.distillation import distillation_loss

SFTTraining = Training[SFTConfig, Encoded, Rows]


def train(config: SFTConfig) -> Path:
    """Fine-tune the actor; return the directory of the exported model."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    rows = load_rows(config, config.model, step=1)
    with Run(config, name="step1_sft", total_steps=rows.total_steps, mesh=mesh) as run:
        sft = load_model(config, rows, run)
        passes, held_out, best, config = sft.passes, sft.held_out, sft.best, sft.config
        before = sft.checkpoints.once(
            "before", lambda: perplexity(passes, split_rows(held_out, config))
        )
        check_initial_metrics(config.model.path, {"held-out perplexity": before})
        tasks = make_task_evaluations(sft)
        initial_tasks = sft.checkpoints.once("tasks", tasks.metrics)
        if sft.checkpoints.done == 0:
            best.update(before, step=0)
            run.log_eval(0, {"perplexity": before, **initial_tasks})

        def out_of_patience() -> bool:
            return best.worse_in_a_row == config.patience

        with exporting_best(run, best, sft.export, model=config.model):
            for step in sft.checkpoints.steps(should_stop=out_of_patience):
                batch = encode(rows.next_examples(), rows.chat, config)
                take_step(sft, batch, run, step=step)
                if sft.evaluates_after(step):
                    best.update(perplexity(passes, split_rows(held_out, config)), step=step)
                    run.log_eval(step, {"perplexity": best.last, **tasks.metrics()})
                    check_finite(f"after step {step}", {"held-out perplexity": best.last})
        finish(sft, run, tasks, before=before, initial_tasks=initial_tasks)
    return config.output_dir


def load_model(config: SFTConfig, rows: Rows, run: Run) -> SFTTraining:
    """Load the actor into its engine, and restore the run's state if it is resumed."""
    model, passes = make_policy(
        config.model,
        rows.tokenizer,
        config.parallel,
        run.mesh,
        total_steps=rows.total_steps,
        seed=config.seed,
        name="actor",
    )
    set_stop_tokens(model, rows.chat.stop_ids)
    config = limit_to_context(config, config.model)
    check_rows(rows.data, make_fit_check(rows.chat, config), config)
    held_out = encode(rows.data.eval, rows.chat, config)
    return set_up(config, model, passes.engine, rows, held_out, run, passes=passes)


def take_step(sft: SFTTraining, rows: Sequence[Encoded], run: Run, *, step: int) -> None:
    """Take one optimizer step on the rows, and log it."""
    weight, kls = sft.config.distill_weight, list[Tensor]()

    def compute_loss(batch: TokenBatch) -> Tensor:
        loss, kl = sft.engine(batch, fn=partial(distillation_loss, batch=batch, weight=weight))
        kls.append(kl)
        return loss

    train_step(
        sft.passes,
        split_rows(rows, sft.config),
        run,
        step=step,
        tokens=sum(map(len, rows)),
        targets=sum(row.num_targets for row in rows),
        loss=compute_loss if weight > 0 else None,
        sums={"teacher_kl": kls} if weight > 0 else {},
    )


def make_task_evaluations(sft: SFTTraining) -> TaskEvaluations:
    """Set up the configured evaluation tasks for the current model."""
    generating = HybridEngine(sft.engine, sft.model).generating
    return TaskEvaluations(sft.config, sft.rows.chat, generating)


def finish(
    sft: SFTTraining,
    run: Run,
    tasks: TaskEvaluations,
    *,
    before: float,
    initial_tasks: Mapping[str, float],
) -> None:
    """Export the best weights and write the result.

    Args:
        sft: the trained model.
        run: receives the result.
        tasks: evaluated once more if the best weights are not the last ones.
        before: perplexity of the initial model.
        initial_tasks: task metrics of the initial model.
    """
    after, step = export_best(sft)
    run.finish(
        eval={
            "perplexity_before": before,
            "perplexity_after": after,
            "best_step": step,
            "rows": len(sft.rows.data.eval),
            **tasks.summary(initial_tasks, changed=step != sft.best.last_step),
        },
    )
    warn_if_not_improved(sft, step, before)


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(SFTConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
