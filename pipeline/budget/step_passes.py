"""How a step runs its models: rows, kernels, recomputation."""

from dataclasses import dataclass, replace

from pipeline.budget.machine import Machine
from pipeline.budget.models import CountedModel
from pipeline.budget.passes import Pass, Rows
from pipeline.config import Workload


@dataclass(frozen=True)
class StepPasses:
    """The passes of a step, at their largest."""

    workload: Workload
    machine: Machine
    models: tuple[CountedModel, ...]

    def micro_batch(self) -> Rows:
        """The largest that the step makes."""
        return Rows(self.workload.sequences, self.workload.length, self.workload.targets)

    def training(self, model: CountedModel) -> Pass:
        """How a model that learns is run."""
        engine = model.trained
        assert engine is not None
        shared = not self.machine.has_gpu and engine.zero.shared_memory
        return Pass(
            self.micro_batch(),
            "train",
            scores=model.scores,
            gpu=self.machine.has_gpu,
            kernels=engine.kernels,
            uniform=self.workload.uniform,
            entropy=self.workload.learns_entropy,
            temperature=self.workload.temperature,
            checkpoint_every=engine.checkpoint_every if engine.gradient_checkpointing else None,
            narrow=self.workload.shards > 1 and shared,
        )

    def reading_texts(self, model: CountedModel) -> Pass:
        """How a model is run for the language-model loss beside the step's own."""
        length = self.workload.model(model.role).text_length
        assert length is not None
        return replace(
            self.training(model),
            rows=Rows(self.workload.rows, length, length - 1),
            uniform=True,
            entropy=False,
            temperature=1.0,
        )

    def scoring(self, model: CountedModel) -> Pass:
        """How a model is asked without gradients."""
        like = next((each.trained for each in self.models if each.trained is not None), None)
        return Pass(
            self.micro_batch(),
            "ask",
            scores=model.scores,
            gpu=self.machine.has_gpu,
            kernels="auto" if like is None else like.kernels,
            entropy=self.workload.model(model.role).scores_entropy,
            temperature=self.workload.temperature,
        )
