"""Prompts are read in chunks, and from what a slot holds of them."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch, has_fixed_positions
from inference.engine.pieces import share_out
from inference.engine.requests import Request, Response, Ticket, Token
from inference.engine.sampling import Sampler
from pipeline.config import FrozenModelConfig
from pipeline.models.load import load_causal_lm
from tests.families import random_rows, saved, tiny_causal_lm
from tests.inference.closeness import NATS, assert_close

CAPACITY = 448
WARM = Sampler(temperature=1.0, seed=3)
TEXTS = [tuple(row.input_ids) for row in random_rows((40, 300, 25, 90, 18, 210))]
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}

Opened = Callable[..., OpenBatch]


def saved_model(tmp_path: Path) -> PreTrainedModel:
    path = saved(tiny_causal_lm("llama", **SIZES), tmp_path)
    return load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return saved_model(tmp_path)


def opened(model: PreTrainedModel, slots: int = 3, **settings: int) -> OpenBatch:
    return OpenBatch(
        model, num_slots=slots, capacity=CAPACITY, **{"chunk": 32, "reuses": True, **settings}
    )


def asked(prompt: Sequence[int], *, key: int = 0, length: int = 12, scope: str = "") -> Request:
    return Request(tuple(prompt), WARM, key, length, scope=scope)


def answer(batch: OpenBatch, request: Request) -> Ticket:
    ticket = batch.submit(request)
    finish(batch)
    return ticket


def finish(batch: OpenBatch) -> None:
    while batch.busy:
        batch.step()


def read_anew(model: PreTrainedModel, request: Request) -> Response:
    """What a slot that holds nothing gives, its prompt read in one pass."""
    batch = OpenBatch(model, num_slots=1, capacity=CAPACITY)
    return answer(batch, request).response


def test_next_turn_matches_the_conversation_read_anew(tmp_path: Path) -> None:
    """Ids and log-probabilities; of the turns before nothing is read again."""
    model = saved_model(tmp_path)
    batch = opened(model)
    context: tuple[int, ...] = TEXTS[0]
    reused: list[int] = []
    held: list[int] = [0]
    for turn, text in enumerate(TEXTS[1:5]):
        request = asked(context, key=turn, length=9)

        ticket = answer(batch, request)

        assert_close([ticket.response], [read_anew(model, request)])
        reused.append(ticket.num_reused)
        held.append(len(context) + 8)  # its last token is read with the next turn
        context = (*context, *ticket.response.ids, *text[:150])

    assert reused == held[:-1]


@pytest.mark.parametrize("chunk", [7, 96])
def test_prompt_read_in_chunks(tmp_path: Path, chunk: int) -> None:
    model = saved_model(tmp_path)
    requests = [asked(text, key=number) for number, text in enumerate(TEXTS)]
    batch = opened(model, slots=len(TEXTS), chunk=chunk, reuses=False)

    tickets = [batch.submit(request) for request in requests]
    finish(batch)

    assert_close([each.response for each in tickets], [read_anew(model, each) for each in requests])


@pytest.mark.jobs
@pytest.mark.parametrize("seed", range(2))
def test_dialogues_that_come_and_go_have_the_responses_that_each_has_alone(
    model: PreTrainedModel, seed: int
) -> None:
    """Turns, branches, repetitions and system prompts of two clients in three slots."""
    chance = random.Random(seed)
    known = [TEXTS[0], TEXTS[3], TEXTS[0] + TEXTS[2], TEXTS[5]]
    batch = opened(model)
    tickets: list[Ticket] = []
    for number in range(24):
        begin = chance.choice(known)
        prompt = (*begin[: chance.choice((len(begin), 30))], *TEXTS[1][number : number + 5])
        ticket = batch.submit(asked(prompt, key=number, length=6, scope=chance.choice("ab")))
        tickets.append(ticket)
        for _ in range(chance.choice((0, 3, 15))):
            batch.step()
        if number % 6 == 5:
            batch.cancel(chance.choice(tickets[-3:]))
        if ticket.ended and len(prompt) < 300:
            known.append((*prompt, *ticket.response.ids))
    finish(batch)

    assert sum(each.num_reused for each in tickets) > 200
    for ticket in tickets:
        whole, found = read_anew(model, ticket.request), ticket.response
        count = len(found.ids)
        assert found.ids == whole.ids[:count]
        assert found.logprobs == pytest.approx(whole.logprobs[:count], abs=NATS)
    assert sum(len(ticket.response.ids) == 6 for ticket in tickets) >= 20


def test_a_system_prompt_is_read_once_also_when_all_come_at_once(model: PreTrainedModel) -> None:
    system = TEXTS[5]
    requests = [asked((*system, *TEXTS[number][:12]), key=number) for number in range(3)]
    batch = opened(model)

    tickets = [batch.submit(request) for request in requests]
    finish(batch)

    assert [ticket.num_reused for ticket in tickets] == [0, len(system), len(system)]
    assert_close([each.response for each in tickets], [read_anew(model, each) for each in requests])


def test_equal_prompts_that_come_together_are_read_once_and_the_first_may_leave(
    model: PreTrainedModel,
) -> None:
    requests = [asked(TEXTS[1], key=key) for key in range(3)]
    batch = opened(model)
    first, second, third = (batch.submit(request) for request in requests)
    batch.step()  # 32 of 300 tokens

    batch.cancel(first)
    finish(batch)

    assert first.response.ids == []
    for ticket in (second, third):
        assert_close([ticket.response], [read_anew(model, ticket.request)])


def test_what_was_read_of_a_prompt_that_was_left_is_read_no_more(model: PreTrainedModel) -> None:
    batch = opened(model)
    left = batch.submit(asked(TEXTS[1]))
    for _ in range(3):
        batch.step()
    batch.cancel(left)

    again = answer(batch, asked(TEXTS[1]))

    assert again.num_reused == 96
    assert_close([again.response], [read_anew(model, again.request)])


def test_the_sequence_that_ended_first_makes_room(model: PreTrainedModel) -> None:
    batch = opened(model, slots=2)
    one, two, three = TEXTS[0], TEXTS[3], TEXTS[2]
    answer(batch, asked(one))
    answer(batch, asked(two))
    answer(batch, asked((*one, 5, 6)))  # goes on in its slot
    answer(batch, asked(three))

    held = [answer(batch, asked((*text, 7, 8), length=1)).num_reused for text in (one, two, three)]

    # The second one's slot went to the third; then the first's is older than the third's.
    assert held == [len(one), 0, 0]


def test_a_branch_leaves_a_longer_conversation_where_it_is(model: PreTrainedModel) -> None:
    """A system prompt is copied out of a slot of which it is less than half."""
    batch = opened(model)
    system, long = TEXTS[0], (*TEXTS[0], *TEXTS[3])
    answer(batch, asked(long))

    branch = answer(batch, asked((*system, 5, 6)))
    back = answer(batch, asked((*long, 5, 6)))

    assert (branch.num_reused, back.num_reused) == (len(system), len(long))


def test_nothing_is_taken_over_from_another_scope_or_where_it_is_off(
    model: PreTrainedModel,
) -> None:
    batch = opened(model)
    answer(batch, asked(TEXTS[1], scope="a"))
    assert answer(batch, asked(TEXTS[1], scope="b")).num_reused == 0
    assert answer(batch, asked(TEXTS[1], scope="a")).num_reused == len(TEXTS[1]) - 1

    batch = opened(model, reuses=False)
    assert [answer(batch, asked(TEXTS[1])).num_reused for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_windows_and_learned_positions_go_on_from_what_is_held(family: str, tmp_path: Path) -> None:
    path = saved(tiny_causal_lm(family), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))
    greedy = Sampler(temperature=0.0, seed=0)
    prompt = TEXTS[0][:30]
    batch = OpenBatch(model, num_slots=2, capacity=60, chunk=8, reuses=True)
    first = answer(batch, Request(prompt, greedy, 0, 8))

    request = Request((*prompt, *first.response.ids, 5, 6), greedy, 0, 8)
    second = answer(batch, request)

    assert second.num_reused == 37
    plain = OpenBatch(model, num_slots=1, capacity=60)
    assert second.response.ids == answer(plain, request).response.ids


def test_where_angles_depend_on_the_length_of_a_pass_nothing_is_taken_over(
    tmp_path: Path,
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = saved(tiny_causal_lm("llama", rope_parameters=scaling), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))
    assert not has_fixed_positions(model)

    batch = OpenBatch(model, num_slots=1, capacity=60, chunk=8, reuses=True)
    tickets = [answer(batch, asked(TEXTS[0][:30], length=4)) for _ in range(2)]

    assert tickets[1].num_reused == 0


@pytest.mark.parametrize(("chunk", "order"), [(32, [True] * 10), (96, [False, True] * 3)])
def test_a_token_comes_with_each_chunk_of_a_long_prompt(
    model: PreTrainedModel, chunk: int, order: list[bool]
) -> None:
    """Others wait for one chunk, not for the prompt: 300 tokens in 10 passes, or 4."""
    batch = opened(model, slots=2, chunk=chunk)
    runs = batch.submit(replace(asked(TEXTS[2]), max_new_tokens=100))
    batch.step()
    long = batch.submit(asked(TEXTS[1]))

    steps: list[bool] = []
    while not long.response.ids:
        events = batch.step()
        steps.append(any(isinstance(event, Token) and event.ticket is runs for event in events))

    assert steps[: len(order)] == order
    finish(batch)
    assert_close([long.response], [read_anew(model, long.request)])
    assert_close([runs.response], [read_anew(model, runs.request)])


@pytest.mark.parametrize("reuses", [False, True])
def test_a_prompt_that_is_there_is_answered_while_another_one_is_read(
    model: PreTrainedModel, reuses: bool
) -> None:
    batch = opened(model, slots=3, reuses=reuses)
    runs = batch.submit(asked(TEXTS[0], length=60))
    batch.step()
    short = asked(TEXTS[2], length=3)
    first = batch.submit(short)
    long = batch.submit(asked(TEXTS[1]))
    again = batch.submit(replace(short, key=1))  # waits for the slot of the first one
    steps = 0
    while not again.response.ids and steps < 60:
        batch.step()
        steps += 1

    assert again.response.ids
    assert not long.response.ids
    finish(batch)
    for ticket in (runs, first, long, again):
        assert_close([ticket.response], [read_anew(model, ticket.request)])


def test_prompts_within_a_time_budget(model: PreTrainedModel) -> None:
    batch = OpenBatch(model, num_slots=4, capacity=CAPACITY, chunk=96, gap=1.5)
    tickets = [batch.submit(asked(TEXTS[0], length=60))]
    for text in TEXTS[1:]:
        for _ in range(7):
            batch.step()
        tickets.append(batch.submit(asked(text)))
    finish(batch)

    for ticket in tickets:
        assert_close([ticket.response], [read_anew(model, ticket.request)])


@pytest.mark.parametrize(
    ("left", "most", "counts"),
    [
        ([5], 8, [5]),
        ([20], 8, [8]),
        ([20, 3], 8, [5, 3]),
        ([20, 9, 2, 1], 8, [5, 0, 2, 1]),
        ([20, 9], 8, [8, 0]),
        ([6, 3, 2], 8, [6, 0, 2]),
        ([20, 4, 5], 8, [4, 4, 0]),
    ],
)
def test_a_pass_is_shared_out(left: list[int], most: int, counts: list[int]) -> None:
    assert share_out(left, most) == counts
