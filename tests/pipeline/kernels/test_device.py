"""The kernels on a GPU, where there is one: the cases of the emulator on the device."""

import dataclasses

import pytest
import torch

from pipeline.kernels.adamw import ShardTable, step_scalars
from pipeline.kernels.gpu import Gpu, gpu_of
from tests.pipeline.kernels.adamw.cases import CPU, STEP, Case, by_definition, copied, make_shards
from tests.pipeline.kernels.test_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("kind", ["QUICK", "GRID", "LARGE"])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_its_definition_every_time(name: str, kind: str, gpu: Gpu) -> None:
    cases, wrong = CASES[name], []
    for case in getattr(cases, kind, ()):
        inputs = [cases.make_inputs(case, gpu.device) for _ in range(3)]
        out, again = (cases.run(case, each, gpu) for each in inputs[:2])
        if not cases.is_right(case, inputs[2], out) or not all(map(torch.equal, out, again)):
            wrong.append(str(case))

    assert not wrong


def test_a_graph_reads_new_scalars_and_lengths(gpu: Gpu) -> None:
    shards, expected = (make_shards(Case(), (1000,), device=each) for each in (gpu.device, CPU))
    table, scalars = ShardTable(shards, gpu), step_scalars(STEP, gpu.device)
    others = ShardTable([copied(shard) for shard in shards], gpu)
    others.step(scalars, STEP)  # compiled and loaded before a graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.step(scalars, STEP)

    for step in (5, 6):
        numbers = dataclasses.replace(STEP, step=step)
        scalars.copy_(step_scalars(numbers, gpu.device))
        graph.replay()
        by_definition(expected[0], numbers)

    assert torch.equal(shards[0].weights.master.cpu(), expected[0].weights.master)
