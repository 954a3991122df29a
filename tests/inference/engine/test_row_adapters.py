"""Rows of one batch with different adapters have the responses that each has alone, and peft's."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from inference.engine.batch import OpenBatch
from inference.engine.requests import Request, Ticket
from inference.engine.sampling import Sampler
from inference.serve.adapters import with_adapter, with_adapters_by_row
from pipeline.config import FrozenModelConfig, LoraConfig
from pipeline.models.load import load_causal_lm
from tests.inference.closeness import assert_close
from tests.inference.embedded_adapters import with_random_adapter

CPU = torch.device("cpu")
KINDS = (
    LoraConfig(rank=4, alpha=8),
    LoraConfig(rank=24, alpha=6, targets=("q_proj", "down_proj"), variant="rslora"),
)
PROMPTS = [[3 + (7 * row + 5 * place) % 90 for place in range(4 + 3 * row)] for row in range(6)]
NEW = 10


def adapter(directory: Path, kind: LoraConfig, seed: int) -> Path:
    with_random_adapter(kind, seed=seed).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [adapter(tmp_path_factory.mktemp("a"), kind, seed) for seed, kind in enumerate(KINDS)]


def make_batch(directories: Sequence[Path]) -> OpenBatch:
    base = load_causal_lm(FrozenModelConfig(path="embedded"), device=CPU)
    model, rows = with_adapters_by_row(base, [with_adapter(base, each) for each in directories])
    return OpenBatch(model, num_slots=6, capacity=64, chunk=16, reuses=True, adapters=rows)


def request(row: int, adapter: int, temperature: float = 1.0) -> Request:
    sampler = Sampler(temperature=temperature, seed=5, min_new_tokens=NEW)
    return Request(tuple(PROMPTS[row]), sampler, key=row, max_new_tokens=NEW, adapter=adapter)


def responses(batch: OpenBatch, requests: Sequence[Request]) -> list[Ticket]:
    tickets = [batch.submit(each) for each in requests]
    while batch.busy:
        batch.step()
    return tickets


def assert_same(found: Sequence[Ticket], expected: Sequence[Ticket]) -> None:
    assert_close([each.response for each in found], [each.response for each in expected])


@pytest.mark.jobs
def test_rows_of_all_adapters_have_the_responses_that_each_has_alone(
    directories: list[Path],
) -> None:
    batch = make_batch(directories)
    requests = [request(row, row % 3) for row in range(6)]
    alone = [responses(make_batch(directories), [each])[0] for each in requests]
    base = load_causal_lm(FrozenModelConfig(path="embedded"), device=CPU)
    plain = OpenBatch(base, num_slots=6, capacity=64)

    together = responses(batch, requests)
    again = responses(batch, requests)  # from traces, with stored prompts

    assert_same(together, alone)
    assert_same(again, alone)
    assert_same(together[0::3], responses(plain, [request(row, 0) for row in (0, 3)]))
    assert len({str(ticket.response.ids) for ticket in together}) == 6


def test_a_prompt_takes_over_nothing_that_another_adapter_stored(directories: list[Path]) -> None:
    batch = make_batch(directories)
    responses(batch, [request(5, 1)])

    (same,) = responses(batch, [request(5, 1)])
    (other,) = responses(batch, [request(5, 2)])

    assert (same.num_reused > 0, other.num_reused) == (True, 0)
    assert_same([other], responses(make_batch(directories), [request(5, 2)]))
