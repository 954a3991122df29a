"""An engine saved and loaded by itself, for people who bring their own loop."""

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.engine.checkpoint.base import Traces, traces
from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.find import candidates
from pipeline.engine.checkpoint.layout import Fragment
from pipeline.engine.checkpoint.writer import CheckpointWriter
from pipeline.engine.engine import Engine
from pipeline.engine.state import describe, frozen_fragments, load, trained_fragments
from pipeline.errors import CheckpointError
from pipeline.parallel.group import Group
from pipeline.parallel.mesh import current_mesh
from pipeline.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)

NAME = "model"


class EngineCheckpoints:
    """The checkpoints of one engine, in whatever directories its owner names.

    Frozen weights are written to a directory once, however often the engine is saved to it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._world = current_mesh().world
        self._bases: dict[Path, tuple[str, Traces]] = {}
        """By directory: the frozen weights that are there, as they were left."""

    def save(self, root: Path, client_state: Any = None) -> None:  # noqa: ANN401
        """Write the state after the engine's last step; returns when it is there.

        All processes call it.

        Raises:
            CheckpointError: it could not be written; what was there before still is.
        """
        world = self._world
        job = world.gather_objects(uuid.uuid4().hex[:12])[0]
        known = self._bases.get(root.resolve())
        writer = CheckpointWriter(
            root,
            job=job,
            rank=world.rank,
            world_size=world.size,
            bases=dict([known]) if known else None,
        )
        described = describe(self._engine)
        base = (known[0] if known else f"base-{job}") if described["frozen"] else None
        if base is not None:
            if world.gather_objects(writer.lost_base(base))[0]:
                writer.forget_base(base)
            writer.save_base(base, frozen_fragments(self._engine, NAME))
        document = {"engines": {NAME: described}, "client_state": client_state}
        fragments = chain(trained_fragments(self._engine, NAME), random_fragments(world))
        writer.save(self._engine.steps, fragments, document, base=base)
        writer.close()
        # Whether all goes well is known to all or to none: they must agree on what is there.
        failure = next((each for each in world.gather_objects(writer.failure) if each), None)
        if failure is not None:
            raise CheckpointError(failure)
        if base is not None:
            self._bases[root.resolve()] = base, writer.base_traces(base)

    def load(self, root: Path) -> Any:  # noqa: ANN401
        """Go on from the newest checkpoint that verifies; what it was saved with. All call it.

        Raises:
            CheckpointError: there is none, or it is of another model.
        """
        checkpoint = newest_on_all(root, self._world)
        if checkpoint is None:
            raise CheckpointError(f"{root} holds no checkpoint")
        load(self._engine, NAME, checkpoint, checkpoint.state["engines"][NAME])
        load_random_state(checkpoint, self._world)
        if checkpoint.base is not None:
            base = checkpoint.base.path
            self._bases[root.resolve()] = base.name, traces(base)
        return checkpoint.state["client_state"]


def newest_on_all(
    root: Path,
    world: Group,
    *,
    among: Callable[[Path], Sequence[Path]] = candidates,
    near: Mapping[str, Mapping[str, Path]] | None = None,
) -> Checkpoint | None:
    """The newest checkpoint whose files are what was written; each process reads its share.

    Args:
        root: of the checkpoints.
        world: the processes, which all call it.
        among: what to try, in this order; what the first process finds counts.
        near: copies of files on this process's machine, as `Checkpoint.open` takes them.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    passed_over: list[str] = []
    found = among(root) if world.rank == 0 else []
    for path in world.gather_objects(found)[0]:
        checkpoint, problem = _opened(path, world, near)
        if checkpoint is None and near:
            logger.warning("%s; reading it in %s", problem, root)
            checkpoint, problem = _opened(path, world, None)
        problems = [each for each in world.gather_objects(problem) if each]
        if checkpoint is not None and not problems:
            return checkpoint
        passed_over.append(problems[0])
        logger.warning("%s; trying the one before", problems[0])
    if passed_over:
        raise CheckpointError(
            f"none of the {len(passed_over)} checkpoints in {root} can be used: {passed_over[0]};"
            " restore one, or pass --overwrite to start again"
        )
    return None


def random_fragments(world: Group) -> list[Fragment]:
    """This process's random number generators."""
    return [
        Fragment(f"random/{world.rank}/{name}", 0, tensor)
        for name, tensor in random_state().items()
    ]


def load_random_state(checkpoint: Checkpoint, world: Group) -> None:
    """This rank's generators; where there are more processes now, the new ones keep theirs."""
    found = checkpoint.written_alone(f"random/{world.rank}/")
    if found:
        set_random_state(found)


def _opened(
    path: Path, world: Group, near: Mapping[str, Mapping[str, Path]] | None
) -> tuple[Checkpoint | None, str]:
    try:
        checkpoint = Checkpoint.open(path, rank=world.rank, near=near)
        checkpoint.verify(share=world.rank, shares=world.size)
    except CheckpointError as error:
        return None, str(error)
    return checkpoint, ""
