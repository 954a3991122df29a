"""The kernels on a GPU, where there is one: what the emulator was asked, of the device."""

import dataclasses
from types import ModuleType

import pytest
import torch

from pipeline.kernels.adamw.cases import (
    KINDS,
    STEP,
    Kind,
    by_reference,
    copied,
    is_right,
    moved,
    shards_of,
)
from pipeline.kernels.adamw.cuda import ShardTable, adamw_, scalars_of
from pipeline.kernels.cache_append import cases as append_cases
from pipeline.kernels.cache_append import cuda as append
from pipeline.kernels.cache_append import definition as append_definition
from pipeline.kernels.decode_attention import cases as attention_cases
from pipeline.kernels.sampling import cases as sampling_cases
from pipeline.kernels.toolchain.gpu import Gpu, gpu_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return gpu_of(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("cases", [attention_cases, sampling_cases])
def test_what_is_computed_is_the_definitions_and_the_same_every_time(
    cases: ModuleType, gpu: Gpu
) -> None:
    wrong: list[str] = []
    for case in cases.GRID:
        inputs = cases.inputs_of(case, gpu.device)
        out, again = (cases.run(case, inputs, gpu) for _ in range(2))
        if not cases.is_right(case, inputs, out) or not all(map(torch.equal, out, again)):
            wrong.append(str(case))

    assert not wrong


def test_the_cache_ends_in_the_bits_of_the_definition(gpu: Gpu) -> None:
    inputs = {str(case): append_cases.inputs_of(case, gpu.device) for case in append_cases.CASES}

    assert not [name for name, each in inputs.items() if not append_cases.is_right(each, gpu)]


def test_adamw_has_the_bits_of_the_definition_on_a_cpu(gpu: Gpu) -> None:
    assert not [str(kind) for kind in KINDS if not is_right(kind, gpu)]


def test_a_graph_reads_new_scalars_and_lengths(gpu: Gpu) -> None:
    shards = [moved(shard, gpu.device) for shard in shards_of(Kind(), sizes=(1000,))]
    expected = [copied(moved(shard, torch.device("cpu"))) for shard in shards]
    table, scalars = ShardTable(shards, gpu), scalars_of(STEP, gpu.device)
    others = ShardTable([copied(shard) for shard in shards], gpu)
    adamw_(others, scalars, betas=STEP.betas, eps=STEP.eps)  # compiled and loaded before a graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adamw_(table, scalars, betas=STEP.betas, eps=STEP.eps)

    for step in (5, 6):
        numbers = dataclasses.replace(STEP, step=step)
        scalars.copy_(scalars_of(numbers, gpu.device))
        graph.replay()
        by_reference(expected[0], numbers)

    assert torch.equal(shards[0].weights.master.cpu(), expected[0].weights.master)


def test_a_graph_reads_new_places_and_positions(gpu: Gpu) -> None:
    case = sampling_cases.QUICK[4]
    inputs = sampling_cases.inputs_of(case, gpu.device)
    stored = append_cases.inputs_of(append_cases.CASES[0], gpu.device)
    sampling_cases.run(case, inputs, gpu)
    assert append_cases.is_right(stored, gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = sampling_cases.run(case, inputs, gpu)
        append.append_(stored.cache, stored.states, stored.places, gpu=gpu)

    for _ in range(2):
        inputs.positions.add_(1)
        stored.places.add_(1)
        expected = (stored.cache[0].clone(), stored.cache[1].clone())
        append_definition.append_(expected, stored.states, stored.places)
        graph.replay()

        assert sampling_cases.is_right(case, inputs, (tokens, logprobs))
        assert all(map(torch.equal, stored.cache, expected))
