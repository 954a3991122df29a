"""The command of a step: settings, memory, threads, processes, then its `train`."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.budget.fit import check_memory
from pipeline.cli.options import parse_step
from pipeline.config import StepConfig
from pipeline.parallel import launched
from pipeline.parallel.mesh import cut_mesh
from pipeline.parallel.process_group import process_group
from pipeline.system.logs import configure_logging
from pipeline.system.torch_process import (
    gpu_numerics,
    set_compute_threads,
    use_expandable_segments,
)
from pipeline.watchdog.process import watching

C = TypeVar("C", bound=StepConfig)


def run_step(config_class: type[C], train: Callable[[C], object], argv: Sequence[str]) -> None:
    """Run a step on the processes that torchrun started, or on this one.

    Args:
        config_class: the step's settings.
        train: runs the step with them.
        argv: the command line.

    Raises:
        ConfigError: a setting can't be used, or the step needs more memory than there is.
    """
    config = parse_step(config_class, argv)
    use_expandable_segments()
    set_compute_threads(config.threads)
    config.parallel.check(launched.world_size())
    check_memory(config)
    parallel, patience = config.parallel, config.timeout_seconds
    with (
        process_group(watching, patience),
        cut_mesh(
            replicas=parallel.replicas, pp=parallel.pp, tp=parallel.tp, timeout_seconds=patience
        ) as mesh,
        gpu_numerics(tf32=config.tf32, deterministic=config.is_deterministic),
    ):
        configure_logging(is_main=mesh.is_main)
        train(config)
