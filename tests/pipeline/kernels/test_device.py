"""The emulator's cases on a GPU, if there is one."""

import dataclasses

import pytest
import torch

from pipeline.kernels.adamw import ShardTable, step_scalars
from pipeline.kernels.gpu import Gpu, get_gpu
from tests.pipeline.kernels.adamw.cases import CPU, STEP, Case, clone, make_shards, reference_step
from tests.pipeline.kernels.test_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return get_gpu(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("kind", ["QUICK", "GRID", "LARGE"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_matches_its_definition_and_is_deterministic(name: str, kind: str, gpu: Gpu) -> None:
    cases, failed = CASES[name], []
    for case in getattr(cases, kind, ()):
        inputs = [cases.make_inputs(case, gpu.device) for _ in range(3)]
        first, second = (cases.run(case, tensors, gpu) for tensors in inputs[:2])
        if not cases.is_correct(case, inputs[2], first) or not all(map(torch.equal, first, second)):
            failed.append(str(case))

    assert not failed


def test_cuda_graph_reads_new_scalars(gpu: Gpu) -> None:
    shards, expected = (make_shards(Case(), (1000,), device=device) for device in (gpu.device, CPU))
    table, scalars = ShardTable(shards, gpu), step_scalars(STEP, gpu.device)
    copies = [clone(shard) for shard in shards]
    ShardTable(copies, gpu).step(scalars, STEP)  # compiles and loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.step(scalars, STEP)

    for number in (5, 6):
        step = dataclasses.replace(STEP, step=number)
        scalars.copy_(step_scalars(step, gpu.device))
        graph.replay()
        reference_step(expected[0], step)

    assert torch.equal(shards[0].weights.master.cpu(), expected[0].weights.master)
