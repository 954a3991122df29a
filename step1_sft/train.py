"""Step 1: supervised fine-tuning of the actor on demonstrations.

python -m step1_sft.train --config configs/sft/opt-125m.yaml
torchrun --nproc_per_node 2 -m step1_sft.train --config configs/sft/opt-125m.yaml
"""

from pipeline.cli import before_imports
from step1_sft.config import SFTConfig

if __name__ == "__main__":
    before_imports(SFTConfig)

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from evaluation.answering import Chat
from evaluation.in_training import TaskEvaluations, generating_from
from pipeline.cli import run_main
from pipeline.data.examples import Encoded
from pipeline.divergence import check_finite, check_start, keeping_best
from pipeline.engine.engine import Engine
from pipeline.models.card import Card
from pipeline.models.export import set_stop_tokens
from pipeline.models.forward import Policy
from pipeline.models.passes import Passes, own_stage, passes_of
from pipeline.models.stages import Passage
from pipeline.models.trained import evaluating, trained_causal_lm, within_context
from pipeline.offline import Rows, Training, load_rows, set_up
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from pipeline.random_state import seed_generators
from pipeline.run import Run
from pipeline.run_step import run_step
from step1_sft.batches import check_rows, cut, encode
from step1_sft.losses import next_token_nll

logger = logging.getLogger(__name__)

METHOD = "Fine-tuned on demonstrations: the responses' tokens alone are learned."


def train(config: SFTConfig) -> Path:
    """Fine-tune the actor; return the directory of the exported model."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)  # of adapter dropout
    rows = load_rows(config, config.model, step=1)
    with Run(config, name="step1_sft", total_steps=rows.total_steps, mesh=mesh) as run:
        sft = load_model(config, rows, run)
        passes, held_out, best, config = sft.passes, sft.held_out, sft.best, sft.config
        before = sft.checkpoints.once("before", lambda: perplexity(passes, held_out, config))
        check_start(config.model.path, {"held-out perplexity": before})
        tasks = open_tasks(sft)
        first = sft.checkpoints.once("tasks", tasks.metrics)
        if sft.checkpoints.done == 0:
            best.update(before, step=0)
            run.evaluated(0, {"perplexity": before, **first})

        def enough() -> bool:
            return best.worse_in_a_row == config.patience

        with keeping_best(run, best, sft.export, model=config.model):
            for step in sft.checkpoints.steps(enough=enough):
                batch = encode(rows.next_examples(), rows.chat, config)
                learn(sft, batch, run, step=step)
                if sft.evaluates_after(step):
                    best.update(perplexity(passes, held_out, config), step=step)
                    run.evaluated(step, {"perplexity": best.last, **tasks.metrics()})
                    check_finite(f"after step {step}", {"held-out perplexity": best.last})
        finish(sft, run, tasks, before=before, first=first)
    return config.output_dir


def load_model(config: SFTConfig, rows: Rows, run: Run) -> Training[SFTConfig, Encoded]:
    """The actor in its engine, with the state of an earlier run where this one goes on."""
    stages = run.mesh.stages
    model = trained_causal_lm(
        config.model,
        rows.tokenizer,
        device=local_device(),
        seed=config.seed,
        in_stages=stages.size > 1,
    )
    set_stop_tokens(model, rows.chat.stop_ids)
    stage = own_stage(model, config.parallel, stages)
    part = Policy if stage.is_last else Passage
    engine = Engine(
        part(model, kernels=config.model.kernels),
        config.model,
        total_steps=rows.total_steps,
        name="actor",
        group=run.mesh.data,
        stages=stages,
    )
    passes = passes_of(engine, stage, config.parallel, stages)
    config = within_context(config, model)
    check_rows(rows.data, rows.chat, config)
    held_out = encode(rows.data.eval, rows.chat, config)
    return set_up(config, model, engine, rows, held_out, run, passes=passes)


def learn(
    sft: Training[SFTConfig, Encoded], rows: Sequence[Encoded], run: Run, *, step: int
) -> None:
    """Take one optimizer step on the rows, and log it."""
    engine, config = sft.engine, sft.config
    num_targets = max(1, sum(row.num_targets for row in rows))
    losses = sft.passes.learn(
        cut(rows, config),
        lambda batch: next_token_nll(engine(batch, uniform=True).logprobs),
        divisor=num_targets,
    )
    result = engine.step()
    run.log(
        step,
        sft.at_peak(rows),
        tokens=sum(len(row) for row in rows),
        loss=run.mesh.data.sum(sft.passes.total(losses)) / num_targets,
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
        **sft.passes.metrics(),
    )


def perplexity(passes: Passes, rows: Sequence[Encoded], config: SFTConfig) -> float:
    """Exp of the mean negative log-likelihood of the held-out target tokens."""
    engine, batches = passes.engine, cut(rows, config)
    with evaluating(engine.model):
        losses = passes.ask(batches, lambda batch: next_token_nll(engine(batch).logprobs))
    num_targets = sum(batch.num_targets for batch in batches)
    total_nll, total_targets = engine.group.sums([passes.total(losses), num_targets])
    return math.exp(min(total_nll / max(1.0, total_targets), 700.0))


def open_tasks(sft: Training[SFTConfig, Encoded]) -> TaskEvaluations:
    """The tasks of the settings, asked of the model as it is now."""
    chat = Chat(sft.rows.tokenizer, sft.rows.chat)
    return TaskEvaluations(sft.config, chat, generating_from(sft.model, sft.engine))


def finish(
    sft: Training[SFTConfig, Encoded],
    run: Run,
    tasks: TaskEvaluations,
    *,
    before: float,
    first: Mapping[str, float],
) -> None:
    """Export the best weights and write the result.

    Args:
        sft: the trained model.
        run: where the result goes.
        tasks: asked once more where the best weights are not the last ones.
        before: perplexity of the model that the step began with.
        first: its figures of the tasks.
    """
    best, config = sft.best, sft.config
    restored = best.restore()
    sft.export()
    after, step = (best.value, best.step) if restored else (best.last, best.last_step)
    run.finish(
        eval={
            "perplexity_before": before,
            "perplexity_after": after,
            "best_step": step,
            "rows": len(sft.rows.data.eval),
            **tasks.summary(first, changed=restored and best.step != best.last_step),
        },
        models={".": Card("Chat model", METHOD, config.model.path or "", ("sft",))},
    )
    if step == 0:
        logger.warning(
            "no evaluation was better than the model before training (perplexity %.4g, in the"
            " end %.4g), whose weights are exported: lower model.optim.lr, now %g",
            before,
            best.last,
            config.model.optim.lr,
        )


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(SFTConfig, train, argv, section="sft")


if __name__ == "__main__":
    run_main(main)
