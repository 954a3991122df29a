"""The training engine for loops outside this project: `from rlhf_pipeline import Engine`."""

import uuid
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from pipeline.config import TrainedModelConfig
from pipeline.engine import engine
from pipeline.engine.checkpoint import state
from pipeline.engine.checkpoint.format import Fragment
from pipeline.engine.checkpoint.history import find_newest_valid
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.models.hf.export import export
from pipeline.parallel import launched
from pipeline.parallel import process_group as parallel
from pipeline.parallel.device import local_device
from pipeline.settings.build import Layer, build_config
from pipeline.system.errors import CheckpointError, require
from pipeline.system.torch_process import random_state, set_random_state
from pipeline.watchdog.process import watch_processes

process_group = partial(parallel.process_group, watch_processes)
"""Context manager in which torchrun's processes train together; a single process needs none."""


class Engine(engine.Engine):
    """Trains a model, with its optimizer, at a ZeRO stage.

    Call `engine(...)` and `engine.backward(loss)` for each micro-batch, then `engine.step()`.
    Gradients are summed: divide a mean loss by the number of micro-batches on all processes.

    Args:
        model: a Hugging Face model, or another module, on any device. It keeps its dtype.
        zero_stage: what is sharded over the processes: sums of gradients (0), also the optimizer
            state (1 and 2), or also weights (3).
        optim: settings of `OptimConfig`, such as `{"lr": 1e-4, "weight_decay": 0.01}`.
        zero: settings of `ZeroConfig`, such as `{"offload": {"optimizer": "cpu"}}`.
        total_steps: length of the learning-rate schedule; None keeps the rate constant.
        name: label of the collectives; each engine of a program needs a different one.

    Raises:
        ConfigError: a setting is unknown or out of range, or torchrun's processes have not joined.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        zero_stage: int = 0,
        optim: Mapping[str, Any] | None = None,
        zero: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        name: str = "engine",
    ) -> None:
        constant = {"schedule": "constant"} if total_steps is None else {}
        settings = {"zero_stage": zero_stage, "optim": {**constant, **(optim or {})}}
        layer = Layer({**settings, "zero": zero or {}}, "Engine(...)")
        config = build_config(TrainedModelConfig, [layer])
        require(
            total_steps is not None or config.optim.schedule == "constant",
            f"Engine(...) needs total_steps for the schedule {config.optim.schedule}",
        )
        self.device = local_device()
        """Device of the model: this process's GPU, or the CPU."""
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = buffer.to(self.device)  # noqa: SLF001  # moves only the buffers
        super().__init__(model, config, total_steps=total_steps or 0, name=name)
        require(
            self.group.size == launched.world_size(),
            f"torchrun started {launched.world_size()} processes, which have not joined: create"
            " the engine within `with process_group():`",
        )
        self._writers: dict[Path, tuple[CheckpointWriter, str | None]] = {}
        """Writer, and name of the stored frozen weights, by directory."""

    def save(self, directory: Path | str, progress: Mapping[str, Any] | None = None) -> None:
        """Save the state, with `progress` as JSON, and wait until it is written.

        All processes must call this. The two newest checkpoints are kept. A run killed at any
        instant can resume from one.

        Raises:
            CheckpointError: the state could not be written.
        """
        root, description = Path(directory), state.describe(self)
        if root not in self._writers:
            job = self.group.gather_objects(uuid.uuid4().hex[:12])[0]
            ranks = {"rank": self.group.rank, "world_size": self.group.size}
            writer = CheckpointWriter(root, job=job, **ranks)
            base = f"base-{job}" if description["frozen"] else None
            self._writers[root] = writer, base
            if base is not None:  # frozen weights are written once
                writer.save_base(base, state.frozen_fragments(self, "engine"))
        (writer, base), random = self._writers[root], random_state().items()
        fragments = chain(
            state.trained_fragments(self, "engine"),
            (Fragment(f"random/{self.group.rank}/{name}", 0, tensor) for name, tensor in random),
        )
        document = {"engine": description, "progress": dict(progress or {})}
        writer.save(self.steps, fragments, document, base=base)
        writer.wait()
        failures = [failure for failure in self.group.gather_objects(writer.failure) if failure]
        if failures:
            raise CheckpointError(failures[0])

    def resume(self, directory: Path | str) -> dict[str, Any] | None:
        """Load the newest checkpoint and return its `progress`, or None if there is no checkpoint.

        All processes must call this. The checkpoint may be from another ZeRO stage or number of
        processes.

        Raises:
            CheckpointError: no checkpoint is valid, or the newest is from a different model.
        """
        checkpoint = find_newest_valid(Path(directory), self.group)
        if checkpoint is None:
            return None
        state.load(self, "engine", checkpoint, checkpoint.state["engine"])
        random = checkpoint.read_prefix(f"random/{self.group.rank}/")
        if random:
            set_random_state(random)
        return dict(checkpoint.state["progress"])

    def export(self, directory: Path | str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a Hugging Face directory; all processes must call this."""
        export(self.model, tokenizer, Path(directory), weights=self)
