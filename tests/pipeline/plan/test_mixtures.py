"""The mixtures that `--plan auto` chooses from, and their order."""

from pipeline.budget.fallbacks import changed
from pipeline.budget.machine import GIB, Machine
from pipeline.budget.mesh_sizes import MeshSizes
from pipeline.budget.models import models_of
from pipeline.budget.step_seconds import links_of, step_seconds
from pipeline.config import EMBEDDED, DataConfig, StepConfig, TrainedModelConfig
from pipeline.plan.mixtures import mixtures, ranked
from step1_sft.config import SFTConfig

CONFIG = SFTConfig(
    model=TrainedModelConfig(path=EMBEDDED),
    data=DataConfig(max_length=128),
    batch_size=64,
    micro_batch_size=8,
)
MESH = MeshSizes(pp=(1, 2), tp=(1, 2), replicas=(1, 2))
GPUS = Machine(4, 4, 80 * GIB, None)


def test_each_way_is_there_once_the_fastest_first() -> None:
    found = ranked(mixtures(CONFIG, GPUS, MESH), CONFIG, GPUS, "4xH100-80GB", {})

    made = [changed(CONFIG, each.settings) for each in found]
    whole = [each for each, config in zip(found, made, strict=True) if not config.parallel.is_cut]
    seconds = [seconds_of(changed(CONFIG, each.settings)) for each in whole]
    assert seconds == sorted(seconds)
    assert len({repr(each) for each in made}) == len(made)
    meshes = {(each.parallel.pp, each.parallel.tp, each.parallel.replicas) for each in made}
    assert meshes == {(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 1)}
    for each in made:
        shares = each.workload(4).shards > 1
        assert each.model.zero_stage in ((2, 3) if shares else (0, 3))
        assert each.parallel.pp == 1 or each.model.zero_stage < 3


def seconds_of(config: StepConfig) -> float:
    workload = config.workload(4)
    models = models_of(workload, {}, has_gpu=True)
    return step_seconds(models, workload, GPUS, links_of(GPUS, "4xH100-80GB")).total


def test_what_the_user_gave_is_in_none() -> None:
    fixed = {"micro_batch_size", "parallel.pp", "model.gradient_checkpointing"}

    found = ranked(mixtures(CONFIG, GPUS, MESH, fixed=fixed), CONFIG, GPUS, "", {})

    assert found
    for each in found:
        assert not fixed & each.settings.keys()
