"""Settings of the mesh: how the processes of a step share its models."""

from dataclasses import dataclass

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes of a step are divided; the same for all models that it trains."""

    replicas: int = 1
    """Copies of the sharded models (HSDP, hybrid sharding): each is kept by so many-th of the
    processes, neighbours in rank, which share states by `zero_stage` among themselves alone, and
    gradients are summed over the copies; 1 shares among all."""

    def __post_init__(self) -> None:
        require(self.replicas > 0, f"parallel.replicas must be above 0, got {self.replicas}")

    def check(self, processes: int, *, section: str = "") -> None:
        """Raise unless so many processes can be divided this way.

        Args:
            processes: of the step.
            section: its name before settings on the command line; empty for a step's own.

        Raises:
            ConfigError: one sentence that names the setting and what divides the processes.
        """
        divisors = [n for n in range(1, processes + 1) if processes % n == 0]
        nearest = min(divisors, key=lambda n: (abs(n - self.replicas), n))
        require(
            processes % self.replicas == 0,
            f"{section and f'{section}.'}parallel.replicas {self.replicas} doesn't divide the"
            f" {processes} process{'es' if processes > 1 else ''}; take {nearest}, or start another"
            " number of processes",
        )
