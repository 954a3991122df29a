"""Step 3 without RL: the actor learns from preferences, by DPO and its family.

python -m step3_preference.train --model.path OUT/step1_sft --method dpo
torchrun --nproc_per_node 2 -m step3_preference.train ...
"""

from pipeline.cli.options import before_imports
from step3_preference.config import PreferenceConfig

if __name__ == "__main__":
    before_imports(PreferenceConfig)

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from pipeline.cli.options import run_main
from pipeline.models.trained import within_context
from pipeline.parallel.mesh import current_mesh
from pipeline.run.run import Run
from pipeline.run.training import keeping_best, load_rows, run_step
from pipeline.system.torch_process import seed_generators
from step3_preference.objective import Figures, Point, objective
from step3_preference.reference import RowStore
from step3_preference.rows import ComparedBatch, cut
from step3_preference.setup import Setup, set_up


def train(config: PreferenceConfig) -> Path:
    """Improve the actor; return the directory that holds it."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    config = within_context(config, config.model)  # rows are cut before it is loaded
    store = RowStore(config)
    rows = load_rows(config, config.model, step=3, sift=store.sift)
    with Run(config, name=config.step_name, total_steps=rows.total_steps, mesh=mesh) as run:
        setup = set_up(config, rows, store, run)
        course, training = setup.course, setup.training

        def enough() -> bool:
            return setup.guards.stopped or course.best.worse_in_a_row == config.patience

        with keeping_best(run, course.best, setup.export, model=config.model):
            for step in training.checkpoints.steps(enough=enough):
                learn(setup, run, step=step)
                figures = course.evaluate(step, run)
                if figures:
                    setup.guards.watch(training.checkpoints, step, figures, setup.slow_down)
        course.best.restore()
        setup.export()
        course.end(run, setup.guards)
    return config.output_dir


def learn(setup: Setup, run: Run, *, step: int) -> None:
    """Take one optimizer step on the next rows, and log it."""
    config, rows, reference = setup.training.config, setup.training.rows, setup.reference
    passes, engine = setup.training.passes, setup.training.engine
    first = rows.stream.position
    numbers = next(rows.stream)
    encoded = setup.store.rows(numbers)
    point = Point(reference.z0(encoded, first=first), *setup.weights)
    found = list[Figures]()

    def loss_of(batch: ComparedBatch) -> Tensor:
        assert batch.reference is not None
        logp = batch.rows.sums(engine(batch.tokens).logprobs)
        loss, figures = objective(batch.rows, logp, batch.reference, config, point)
        found.append(figures)
        return loss

    batches = reference.compared(cut(encoded, config), reference.of_rows(numbers))
    passes.learn(batches, loss_of, divisor=len(encoded))
    result = engine.step()
    means = sum(found, Figures.none()).means(passes, len(encoded), paired=not config.is_unpaired)
    run.log(
        step,
        setup.training.peak_seconds(each for row in encoded for each in row.sequences),
        tokens=sum(row.num_tokens for row in encoded),
        **means,
        **({"z0": point.z0} if config.is_unpaired else {}),
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
        **passes.metrics(),
    )


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    run_step(PreferenceConfig, train, argv)


if __name__ == "__main__":
    run_main(main)
