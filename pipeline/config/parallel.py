"""Settings of the mesh: how the processes of a step share its models."""

from dataclasses import dataclass

from pipeline.config.model import TrainedModelConfig
from pipeline.system.errors import counted, require

MICRO_BATCHES_PER_STAGE = 4
"""Default minimum of micro-batches per stage in a step, with which stages are idle for at most a
fifth of the time."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes of a step share the models that it trains."""

    replicas: int = 1
    """Copies of the sharded models (HSDP, hybrid sharding): each is sharded by `zero_stage` over
    1/replicas of the processes, adjacent in rank, and gradients are summed over the copies; 1
    shards over all processes."""

    pp: int = 1
    """Pipeline stages (pipeline_model_parallel_size): each has some of the model's blocks, on 1/pp
    of the processes; 1 does not split the model."""

    tp: int = 1
    """Tensor-parallel size (tensor_model_parallel_size): this number of processes, adjacent in
    rank, share the attention heads and the width of the MLPs of each layer; 1 shards no layer."""

    sequence: bool = True
    """With `tp`, shard the norms and the hidden states between the sharded layers by token
    (sequence_parallel); false replicates them."""

    micro_batches: int | None = None
    """Minimum micro-batches per optimizer step on each process, or each pipeline; null uses as
    many as `micro_batch_size` needs, and with `pp` 4 per stage if there are enough rows and
    `zero.reduction` is fast."""

    def __post_init__(self) -> None:
        for name in ("replicas", "pp", "tp", "micro_batches"):
            value = getattr(self, name)
            require(value is None or value > 0, f"parallel.{name} must be positive, got {value}")

    @property
    def min_micro_batches(self) -> int | None:
        """Minimum micro-batches per step on each pipeline; None if `micro_batch_size` decides."""
        if self.micro_batches is None and self.pp > 1:
            return MICRO_BATCHES_PER_STAGE * self.pp
        return self.micro_batches

    def check(self, processes: int, *, section: str = "") -> None:
        """Check that the processes of a step can be divided this way.

        Raises:
            ConfigError: they can't be divided; the message names the setting within `section`.
        """
        prefix = f"{section}." if section else ""
        replica_scope = " of each stage" if self.tp == 1 else " with the same shard of each layer"
        for name, value, count, scope in (
            ("pp", self.pp, processes, ""),
            ("tp", self.tp, processes // self.pp, " of each stage"),
            ("replicas", self.replicas, processes // (self.pp * self.tp), replica_scope),
        ):
            divisors = [n for n in range(1, count + 1) if count % n == 0] or [1]
            nearest = min(divisors, key=lambda n: (abs(n - value), n))
            total = counted(count, "process") + (scope if count != processes else "")
            require(
                count % value == 0 and count > 0,
                f"{prefix}parallel.{name} {value} doesn't divide the {total}; use {nearest}, or"
                " start a different number of processes",
            )

    def num_pipelines(self, processes: int) -> int:
        """Return the number of processes, or model-parallel groups, with different rows."""
        return max(1, processes // (self.pp * self.tp))

    def check_model(self, role: str, model: TrainedModelConfig) -> None:
        """Raise if a model-parallel group can't train the model with these settings.

        Raises:
            ConfigError: a setting prevents it; the message contains the fix.
        """
        require(
            self.tp == 1 or model.quantize == "none",
            f"{role}.quantize {model.quantize} stores blocks of weights that parallel.tp {self.tp}"
            " can't shard; set parallel.tp to 1, or quantize to none",
        )
        require(
            self.pp == 1 or model.zero_stage < 3,
            f"{role}.zero_stage 3 would gather each block again for every micro-batch of a"
            f" pipeline; use 1 or 2 with parallel.pp {self.pp}",
        )
        require(
            self.pp == 1 or "nvme" not in vars(model.zero.offload).values(),
            f"{role}.zero.offload to nvme is not supported with parallel.pp {self.pp}; use cpu",
        )
