"""What preference optimization works with, and where an earlier run stood."""

from dataclasses import dataclass

from pipeline.guards.guards import Guards
from pipeline.models.export import export, set_stop_tokens
from pipeline.models.forward import Policy
from pipeline.models.passes import passes_of
from pipeline.models.trained import trained_causal_lm
from pipeline.parallel.device import local_device
from pipeline.run.run import Run
from pipeline.run.training import Rows, Training, steps_between_evaluations
from pipeline.run.training import set_up as set_up_training
from step3_preference.config import PreferenceConfig
from step3_preference.evaluate import Course
from step3_preference.guards import PreferenceSignals
from step3_preference.objective import kto_weights
from step3_preference.reference import Reference, RowStore, Start, open_reference
from step3_preference.rows import Row


@dataclass(frozen=True)
class Setup:
    """The actor that learns, what it is compared with, and its evaluations."""

    training: Training[PreferenceConfig, Row, Rows]
    store: RowStore
    reference: Reference
    course: Course
    guards: Guards

    weights: tuple[float, float]
    """Weights of good and of bad responses in the loss kto; other losses ignore them."""

    def slow_down(self) -> None:
        """After each rollback learn half as fast."""
        self.training.engine.lr_scale = 0.5**self.guards.rollbacks

    def export(self) -> None:
        """Write the actor with its present weights to the output directory."""
        training = self.training
        directory = training.config.output_dir / "actor"
        export(training.model, training.rows.tokenizer, directory, weights=training.engine)


def set_up(config: PreferenceConfig, rows: Rows, store: RowStore, run: Run) -> Setup:
    """Load the actor, find the reference, and take up the state of an earlier run with `resume`.

    Raises:
        ModelError: the actor's first figures are not finite.
        ConfigError: settings that the model can't take.
    """
    model = trained_causal_lm(
        config.model,
        rows.tokenizer,
        device=local_device(),
        seed=config.seed,
    )
    set_stop_tokens(model, rows.chat.stop_ids)
    passes = passes_of(
        model,
        config.model,
        config.parallel,
        run.mesh,
        lambda whole: Policy(whole, kernels=config.model.kernels),
        total_steps=rows.total_steps,
        name="actor",
    )
    # Both before any state is loaded: they are of the weights that the run begins with.
    start = Start(passes)
    reference = open_reference(start, rows, store, config)
    interval = steps_between_evaluations(config, rows, store.held_out)
    guards = Guards(config.guards, PreferenceSignals(), interval)
    training = set_up_training(
        config, model, passes.engine, rows, store.held_out, run, guards, passes
    )
    course = Course(training, reference)
    guards.first = course.begin(training.checkpoints, run)
    weights = kto_weights(store.num_good, len(store) - store.num_good, config)
    setup = Setup(training, store, reference, course, guards, weights)
    setup.slow_down()
    return setup
