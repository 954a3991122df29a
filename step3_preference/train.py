"""Step 3 without RL: train the actor on preferences, with DPO or a related method.

python -m step3_preference.train --model.path OUT/step1_sft --method dpo
torchrun --nproc_per_node 2 -m step3_preference.train ...
"""

from pipeline.cli.options import prepare_imports
from step3_preference.config import PreferenceConfig

if __name__ == "__main__":
    prepare_imports(PreferenceConfig)

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipeline.cli.options import run_main
from pipeline.guards.guards import Guards
from pipeline.models.hf.export import set_stop_tokens
from pipeline.models.passes import make_policy
from pipeline.models.trained import limit_to_context
from pipeline.parallel.mesh import current_mesh
from pipeline.run.exporting import export_verified
from pipeline.run.run import Run
from pipeline.run.training import (
    Rows,
    Training,
    choose_eval_interval,
    exporting_best,
    load_rows,
    run_step,
)
from pipeline.run.training import set_up as set_up_training
from pipeline.system.torch_process import seed_generators
from step3_preference.config import PreferenceConfig
from step3_preference.evaluate import Evaluator
from step3_preference.guards import PreferenceSignals
from step3_preference.objective import KTOInputs, MetricSums, kto_weights, objective
from step3_preference.reference import InitialActor, Reference, RowStore, open_reference
from step3_preference.rows import BatchWithReference, Row, split_rows


@dataclass(frozen=True)
class Setup:
    """The trained actor, its reference, and its evaluations."""

    training: Training[PreferenceConfig, Row, Rows]
    store: RowStore
    reference: Reference
    evaluator: Evaluator
    guards: Guards

    weights: tuple[float, float]
    """Weights of good and bad responses in the loss kto; other losses ignore them."""

    def apply_rollbacks(self) -> None:
        """Halve the learning rate for each rollback."""
        self.training.engine.lr_scale = 0.5**self.guards.rollbacks

    def export(self) -> None:
        """Write the actor with its current weights to the output directory."""
        training = self.training
        directory = training.config.output_dir / "actor"
        export_verified(training.passes, training.model, training.rows.tokenizer, directory)


def set_up(config: PreferenceConfig, rows: Rows, store: RowStore, run: Run) -> Setup:
    """Load the actor and the reference and, with `resume`, the state of an earlier run.

    Raises:
        ModelError: the initial actor's metrics are not finite.
        ConfigError: the model doesn't support a setting.
    """
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
    # Create both before any state is loaded: they hold the initial weights.
    initial_actor = InitialActor(passes)
    reference = open_reference(initial_actor, rows, store, config)
    interval = choose_eval_interval(config, rows, store.held_out)
    guards = Guards(config.guards, PreferenceSignals(config.model.peak_lr[0]), interval)
    training = set_up_training(
        config, model, passes.engine, rows, store.held_out, run, guards, passes
    )
    evaluator = Evaluator(training, reference)
    guards.signals = PreferenceSignals(config.model.peak_lr[0], len(evaluator.subset.prompts))
    guards.first = evaluator.begin(training.checkpoints, run)
    weights = kto_weights(store.num_good, len(store) - store.num_good, config)
    setup = Setup(training, store, reference, evaluator, guards, weights)
    setup.apply_rollbacks()
    return setup


def train(config: PreferenceConfig) -> Path:
    """Train the actor and return the output directory."""
    mesh = current_mesh()
    seed_generators(config.seed + mesh.data.rank)
    config = limit_to_context(config, config.model)  # rows are truncated before the model is loaded
    store = RowStore(config)
    rows = load_rows(config, config.model, step=3, filter_rows=store.select)
    with Run(config, name=config.step_name, total_steps=rows.total_steps, mesh=mesh) as run:
        setup = set_up(config, rows, store, run)
        evaluator, training = setup.evaluator, setup.training

        def is_finished() -> bool:
            return setup.guards.stopped or evaluator.best.worse_in_a_row == config.patience

        with exporting_best(run, evaluator.best, setup.export, model=config.model):
            for step in training.checkpoints.steps(should_stop=is_finished):
                take_step(setup, run, step=step)
                metrics = evaluator.evaluate(step, run)
                if metrics:
                    setup.guards.watch(training.checkpoints, step, metrics, setup.apply_rollbacks)
        evaluator.best.restore()
        setup.export()
        evaluator.end(run, setup.guards)
    return config.output_dir


def take_step(setup: Setup, run: Run, *, step: int) -> None:
    """Take one optimizer step on the next rows, and log its metrics."""
    config, rows, reference = setup.training.config, setup.training.rows, setup.reference
    passes, engine = setup.training.passes, setup.training.engine
    first = rows.stream.position
    indices = next(rows.stream)
    encoded = setup.store.rows(indices)
    kto = KTOInputs(reference.z0(encoded, first=first), *setup.weights)
    parts = list[MetricSums]()

    def compute_loss(batch: BatchWithReference) -> Tensor:
        assert batch.reference is not None
        logp = batch.rows.sums(engine(batch.tokens).logprobs)
        loss, metrics = objective(batch.rows, logp, batch.reference, config, kto)
        parts.append(metrics)
        return loss

    batches = reference.add_reference(split_rows(encoded, config), reference.row_logprobs(indices))
    passes.forward_backward(batches, compute_loss, divisor=len(encoded))
    result = engine.step()
    means = sum(parts, MetricSums.zero()).means(passes, len(encoded), paired=not config.is_unpaired)
    run.log(
        step,
        tokens=sum(row.num_tokens for row in encoded),
        **means,
        **({"z0": kto.z0} if config.is_unpaired else {}),
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
