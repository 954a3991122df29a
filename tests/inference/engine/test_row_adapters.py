"""Rows of one batch with adapters of their own: the bits that each has alone, peft's numbers."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from inference.engine.batch import OpenBatch
from inference.engine.requests import Request, Ticket, Token
from inference.engine.row_adapters import COLUMNS, scale_table
from inference.engine.sampling import Sampler
from inference.serve.adapters import with_adapter, with_adapters_by_row
from pipeline.config import FrozenModelConfig, LoraConfig, Precision
from pipeline.errors import DataError
from pipeline.models.load import load_causal_lm
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


def batch_of(directories: Sequence[Path], precision: Precision = "fp32") -> OpenBatch:
    base = load_causal_lm(FrozenModelConfig(path="embedded", precision=precision), device=CPU)
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


def outputs(tickets: Sequence[Ticket]) -> list[tuple[list[int], list[float]]]:
    return [(each.response.ids, each.response.logprobs) for each in tickets]


@pytest.mark.jobs
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.grid)])
def test_rows_of_all_adapters_have_the_bits_that_each_has_alone(
    directories: list[Path], precision: Precision
) -> None:
    batch = batch_of(directories, precision)
    requests = [request(row, row % 3) for row in range(6)]
    alone = [outputs(responses(batch_of(directories, precision), [each]))[0] for each in requests]
    base = load_causal_lm(FrozenModelConfig(path="embedded", precision=precision), device=CPU)
    plain = OpenBatch(base, num_slots=6, capacity=64)

    together = outputs(responses(batch, requests))
    again = outputs(responses(batch, requests))  # of traces, and of prompts that are there

    assert together == alone
    assert again == alone
    assert together[0::3] == outputs(responses(plain, [request(row, 0) for row in (0, 3)]))
    assert len({str(ids) for ids, _ in together}) == 6


def test_one_step_takes_a_token_of_rows_of_every_adapter(directories: list[Path]) -> None:
    batch = batch_of(directories)
    tickets = [batch.submit(request(row, row % 3)) for row in range(6)]
    while not all(ticket.response.ids for ticket in tickets):
        batch.step()

    steps = [batch.step() for _ in range(2)]

    assert {event.ticket for event in steps[-1] if isinstance(event, Token)} == set(tickets)


def test_a_row_says_what_peft_says_of_its_adapter(directories: list[Path]) -> None:
    tickets = responses(batch_of(directories), [request(4, number, 0.0) for number in range(3)])

    for directory, ticket in zip(directories, tickets[1:], strict=True):
        base = load_causal_lm(FrozenModelConfig(path="embedded"), device=CPU)
        peft = PeftModel.from_pretrained(base, str(directory)).eval()
        ids = [*PROMPTS[4], *ticket.response.ids]
        with torch.no_grad():
            logits = peft(input_ids=torch.tensor([ids])).logits[0, len(PROMPTS[4]) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(NEW), ticket.response.ids]
        assert ticket.response.ids == logits.argmax(-1).tolist()
        assert ticket.response.logprobs == pytest.approx(logprobs.tolist(), abs=1e-5)


def test_a_prompt_takes_over_nothing_that_another_adapter_stored(directories: list[Path]) -> None:
    batch = batch_of(directories)
    responses(batch, [request(5, 1)])

    (same,) = responses(batch, [request(5, 1)])
    (other,) = responses(batch, [request(5, 2)])

    assert (same.num_reused > 0, other.num_reused) == (True, 0)
    assert outputs([other]) == outputs(responses(batch_of(directories), [request(5, 2)]))


def test_scales_lie_in_the_columns_of_their_adapter() -> None:
    table = scale_table([(1, 2, 0.5), (3, 3, 2.0)], 3)

    assert table.shape == (4, COLUMNS)
    assert table[:, :6].tolist() == [
        [0, 0, 0, 0, 0, 0],
        [0.5, 0.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 2, 2, 2, 0],
    ]
    assert not table[:, 5:].any()


def test_an_adapter_that_is_not_there_is_refused(directories: list[Path]) -> None:
    with pytest.raises(DataError, match="there is no adapter 3; there are 2"):
        batch_of(directories).submit(request(0, 3))
