"""Admission in groups, prompts in pieces, and reuse of stored prefixes."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from inference.engine.batch import OpenBatch, has_fixed_positions
from inference.engine.replay import PassCounts
from inference.engine.requests import Request, Response, Ticket, Token
from inference.engine.sampling import Sampler
from inference.engine.scheduler import share_out
from inference.generation import generate_each
from pipeline.config import FrozenModelConfig
from pipeline.models.load import load_causal_lm
from tests.families import random_rows, saved, tiny_causal_lm

CAPACITY = 448
WARM = Sampler(temperature=1.0, seed=3)
TEXTS = [tuple(row.input_ids) for row in random_rows((40, 300, 25, 90, 18, 210))]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    path = saved(tiny_causal_lm("llama", max_position_embeddings=512), tmp_path)
    return load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))


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


def assert_same(found: Response, expected: Response, *, count: int | None = None) -> None:
    """Compare tokens, and log-probabilities up to rounding."""
    assert found.ids == expected.ids[:count]
    assert found.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)


def read_anew(model: PreTrainedModel, request: Request) -> Response:
    """The response of a batch that stores nothing yet, its prompt read in one pass."""
    return answer(OpenBatch(model, num_slots=1, capacity=CAPACITY), request).response


def test_prefill_of_512_prompts_over_64_slots_takes_at_most_80_passes(
    model: PreTrainedModel,
) -> None:
    prompts = [(5 + row // 90, 5 + row % 90, 7, 8) for row in range(512)]
    passes = PassCounts()
    finished = generate_each(
        model,
        prompts,
        Sampler(temperature=0.0, seed=0),
        max_new_tokens=16,
        batch_size=64,
        stop_when=lambda index, ids: len(ids) == 4 + index * 7 % 13,
        passes=passes,
    )

    assert len(list(finished)) == 512
    assert passes.prefill <= 80


def test_samples_of_a_prompt_read_it_once(model: PreTrainedModel) -> None:
    prompts = [text for text in TEXTS[:4] for _ in range(8)]
    passes = PassCounts()

    list(generate_each(model, prompts, WARM, max_new_tokens=2, batch_size=64, passes=passes))

    assert passes.prefill == 1


def test_a_next_turn_reads_its_new_messages_only(model: PreTrainedModel) -> None:
    batch = opened(model)
    context: tuple[int, ...] = TEXTS[0]
    reused: list[int] = []
    stored: list[int] = [0]
    for turn, text in enumerate(TEXTS[1:5]):
        request = asked(context, key=turn, length=9)

        ticket = answer(batch, request)

        assert_same(ticket.response, read_anew(model, request))
        reused.append(ticket.num_reused)
        stored.append(len(context) + 8)  # the last token is read with the next turn
        context = (*context, *ticket.response.ids, *text[:150])

    assert reused == stored[:-1]


@pytest.mark.jobs
def test_dialogues_that_come_and_go_have_the_responses_that_each_has_alone(
    model: PreTrainedModel,
) -> None:
    """Turns, branches, repetitions and system prompts of two clients in three slots."""
    chance = random.Random(0)
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
        whole = read_anew(model, ticket.request)
        assert_same(ticket.response, whole, count=len(ticket.response.ids))
    assert sum(len(ticket.response.ids) == 6 for ticket in tickets) >= 20


def test_a_system_prompt_of_requests_that_come_at_once_is_read_once(model: PreTrainedModel) -> None:
    system = TEXTS[5]
    requests = [asked((*system, *TEXTS[number][:12]), key=number) for number in range(3)]
    batch = opened(model)

    tickets = [batch.submit(request) for request in requests]
    finish(batch)

    assert [ticket.num_reused for ticket in tickets] == [0, len(system), len(system)]
    for ticket in tickets:
        assert_same(ticket.response, read_anew(model, ticket.request))


def test_equal_prompts_are_read_once_and_the_first_may_be_cancelled(
    model: PreTrainedModel,
) -> None:
    batch = opened(model)
    first, second, third = (batch.submit(asked(TEXTS[1], key=key)) for key in range(3))
    batch.step()  # 32 of 300 tokens

    batch.cancel(first)
    finish(batch)

    assert first.response.ids == []
    assert second.num_reused == 32
    assert third.num_reused > 299 - 16
    for ticket in (second, third):
        assert_same(ticket.response, read_anew(model, ticket.request))


def test_the_slot_that_was_freed_first_is_used_first(model: PreTrainedModel) -> None:
    batch = opened(model, slots=2)
    one, two, three = TEXTS[0], TEXTS[3], TEXTS[2]
    answer(batch, asked(one))
    answer(batch, asked(two))
    answer(batch, asked((*one, 5, 6)))  # continues in its slot
    answer(batch, asked(three))

    found = [answer(batch, asked((*text, 7, 8), length=1)).num_reused for text in (one, two, three)]

    # The second one's slot went to the third; then the first's is older than the third's.
    assert found == [len(one), 0, 0]


def test_a_branch_copies_its_prefix_out_of_a_longer_conversation(model: PreTrainedModel) -> None:
    batch = opened(model)
    system, long = TEXTS[0], (*TEXTS[0], *TEXTS[3])
    answer(batch, asked(long))

    branch = answer(batch, asked((*system, 5, 6)))
    back = answer(batch, asked((*long, 5, 6)))

    assert (branch.num_reused, back.num_reused) == (len(system), len(long))


def test_scopes_share_nothing_and_reuse_can_be_off(model: PreTrainedModel) -> None:
    batch = opened(model)
    answer(batch, asked(TEXTS[1], scope="a"))
    assert answer(batch, asked(TEXTS[1], scope="b")).num_reused == 0
    assert answer(batch, asked(TEXTS[1], scope="a")).num_reused == len(TEXTS[1]) - 1

    batch = opened(model, reuses=False)
    answer(batch, asked(TEXTS[1]))
    assert answer(batch, asked((*TEXTS[1], 5))).num_reused == 0


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_windows_and_learned_positions_continue_after_a_stored_prefix(
    family: str, tmp_path: Path
) -> None:
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


def test_nothing_is_reused_where_angles_depend_on_the_length_of_a_pass(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    path = saved(tiny_causal_lm("llama", rope_parameters=scaling), tmp_path)
    model = load_causal_lm(FrozenModelConfig(path=path), device=torch.device("cpu"))

    assert not has_fixed_positions(model)
    batch = OpenBatch(model, num_slots=1, capacity=60, chunk=8, reuses=True)
    answer(batch, asked(TEXTS[0][:30], length=4))
    assert answer(batch, asked(TEXTS[0][:31], length=4)).num_reused == 0


def test_running_sequences_get_a_token_with_each_chunk_of_a_long_prompt(
    model: PreTrainedModel,
) -> None:
    batch = opened(model, slots=2, chunk=32)
    running = batch.submit(replace(asked(TEXTS[2]), max_new_tokens=100))
    batch.step()
    long = batch.submit(asked(TEXTS[1]))

    steps: list[bool] = []
    while not long.response.ids:
        events = batch.step()
        steps.append(any(isinstance(event, Token) and event.ticket is running for event in events))

    assert steps == [True] * 10  # 300 tokens
    finish(batch)
    assert_same(long.response, read_anew(model, long.request))
    assert_same(running.response, read_anew(model, running.request))


def test_a_short_prompt_does_not_wait_for_a_long_one(model: PreTrainedModel) -> None:
    batch = opened(model, slots=3)
    long = batch.submit(asked(TEXTS[1]))
    short = batch.submit(asked(TEXTS[4][:12], key=1))
    batch.step()

    assert short.response.ids
    assert not long.response.ids


@pytest.mark.parametrize(
    ("left", "most", "counts"),
    [
        ([5], 8, [5]),
        ([20], 8, [8]),
        ([20, 3], 8, [5, 3]),
        ([20, 9, 2, 1], 8, [5, 0, 2, 1]),
        ([6, 3, 2], 8, [6, 0, 2]),
    ],
)
def test_a_pass_is_divided_among_prompts(left: list[int], most: int, counts: list[int]) -> None:
    assert share_out(left, most) == counts
