"""An open batch whose model is divided among processes: they take the same steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from inference.engine.batch import OpenBatch
from inference.engine.requests import Event, Ticket
from inference.engine.sampling import Sampler
from inference.generation import generate_each
from pipeline.parallel.group import Group
from tests.distributed import rank, run_ranks
from tests.inference.engine.test_batch import PROMPTS, WARM, alone, asked, reasons
from tests.inference.weights.test_sharding import divided, prepared

ENDLESS = replace(WARM, stop_ids=())


def run_tensor_parallel() -> dict[str, object]:
    """What a process hears that submits at other times than its peer, and what it has alone."""
    model = divided(prepared("llama", {}), 2)
    greedy = Sampler(temperature=0.0, seed=0)
    batch = OpenBatch(model, num_slots=2, capacity=40)
    tickets: list[Ticket] = []
    events: list[Event] = []
    for number in range(40):
        if number % 4 == 2 * rank() and len(tickets) < 3:
            tickets.append(batch.submit(asked(len(tickets) + 3 * rank(), greedy)))
        if number == 13:
            batch.cancel(tickets[2])
        events += batch.step()
    told = {event.ticket for event in events}
    ended = reasons(events)
    return {
        "own": told <= set(tickets),
        "ended": [ended[ticket] for ticket in tickets],
        "ids": [ticket.response.ids for ticket in tickets],
        "busy": batch.busy,
    }


def test_peers_agree_on_what_each_of_them_submits_and_cancels() -> None:
    model = prepared("llama", {})
    greedy = Sampler(temperature=0.0, seed=0)

    for of, heard in enumerate(run_ranks(run_tensor_parallel)):
        assert heard["own"]
        assert not heard["busy"]
        assert heard["ended"] == [["length"], ["length"], ["cancelled"]]
        for number, ids in enumerate(heard["ids"]):
            expected = alone(model, asked(number + 3 * of, greedy)).ids
            assert ids == expected[: len(ids)]


def run_guided() -> list[tuple[list[int], str]]:
    """Responses of a process whose peer has no guide, and has requests of its own."""
    model = divided(prepared("llama", {}), 2)
    vocabulary: int = model.config.vocab_size
    batch = OpenBatch(model, num_slots=3, capacity=40)

    def even(response: Sequence[int]) -> np.ndarray:
        if len(response) == 3 + rank():
            raise ValueError("there is no more")
        return np.arange(vocabulary) % 2 == 0

    requests = [asked(0, ENDLESS), replace(asked(1 + rank(), ENDLESS), guide=even)]
    tickets = [batch.submit(each) for each in requests]
    events: list[Event] = []
    while batch.busy:
        events += batch.step()
    ended = reasons(events)
    return [(ticket.response.ids, ended[ticket][0]) for ticket in tickets]


def test_a_guided_response_is_chosen_by_the_process_that_has_its_guide() -> None:
    expected = alone(prepared("llama", {}), asked(0, ENDLESS)).ids

    for of, (free, guided) in enumerate(run_ranks(run_guided)):
        assert free == (expected, "length")
        assert guided[1] == "error"
        assert len(guided[0]) == 3 + of
        assert all(token % 2 == 0 for token in guided[0])


def count_talk() -> int:
    model = divided(prepared("llama", {}), 2)
    counted: list[Callable] = []
    gather = Group.gather_objects

    def count(self: Group, value: object) -> list:
        counted.append(gather)
        return gather(self, value)

    Group.gather_objects = count  # pyright: ignore[reportAttributeAccessIssue]  # of this process
    list(generate_each(model, PROMPTS, WARM, max_new_tokens=9, cache_bytes=10**6))
    return len(counted)


def test_peers_of_a_closed_batch_exchange_prompts_and_a_sum_of_tokens_alone() -> None:
    assert run_ranks(count_talk) == [3, 3]  # prompts, room for the cache, tokens
