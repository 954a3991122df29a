"""How processes can divide the models of a step."""

from pathlib import Path

from pipeline.budget.machine import Machine
from pipeline.budget.mesh_sizes import MeshSizes, mesh_sizes
from pipeline.config import EMBEDDED, TrainedModelConfig
from step1_sft.config import SFTConfig
from tests.families import tiny_config


def of(path: str, processes: int, world: int) -> MeshSizes:
    config = SFTConfig(model=TrainedModelConfig(path=path))
    return mesh_sizes(config, Machine(processes, world, None, None))


def test_stages_divide_all_processes_and_layers_those_of_a_machine() -> None:
    """The embedded model has 4 blocks of 4 heads."""
    assert of(EMBEDDED, 2, 4) == MeshSizes(pp=(1, 2, 4), tp=(1, 2), replicas=(1, 2))
    assert of(EMBEDDED, 8, 8) == MeshSizes(pp=(1, 2, 4), tp=(1, 2, 4), replicas=(1, 2, 4))
    assert of(EMBEDDED, 3, 6) == MeshSizes(pp=(1, 2, 3), tp=(1,), replicas=(1, 2, 3))
    assert of(EMBEDDED, 1, 1) == MeshSizes()


def test_a_family_that_cant_be_cut_is_left_whole(tmp_path: Path) -> None:
    tiny_config("bloom").save_pretrained(tmp_path)  # it runs padded

    assert of(str(tmp_path), 2, 2) == MeshSizes(tp=(1, 2))
    assert of("not/here", 2, 2) == MeshSizes()


def test_only_what_divides_the_processes_together_is_a_division() -> None:
    sizes = MeshSizes(pp=(1, 2, 4), tp=(1, 2), replicas=(1, 2))

    assert list(sizes.combinations(4)) == [
        *((1, 1, 1), (1, 1, 2), (1, 2, 1)),
        *((2, 1, 1), (2, 2, 1), (4, 1, 1)),
    ]
