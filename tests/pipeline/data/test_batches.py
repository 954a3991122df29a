"""How rows become batches: end to end, each once per pass, each in one micro-batch."""

import random
from collections import Counter

import pytest

from pipeline.data.batches import RowStream, collate, micro_batches, prompt_units
from pipeline.data.examples import Encoded


def test_sequences_lie_end_to_end_and_the_first_token_is_never_a_target() -> None:
    batch = collate(
        [Encoded([5, 6, 7], [True, False, True]), Encoded([8], [True]), Encoded([9, 5], [True] * 2)]
    )

    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 5]
    assert batch.lengths == (3, 1, 2)
    assert batch.targets.tolist() == [2, 5]
    assert batch.last_tokens.tolist() == [2, 3, 5]
    assert (batch.num_tokens, batch.num_targets) == (6, 2)


def test_rows_with_the_same_prompt_continue_one_copy_of_it() -> None:
    one, other = ([3, 4], [False, False]), ([3, 5], [False, False])
    rows = [
        Encoded(prompt + ids, untrained + trained)
        for (prompt, untrained), ids, trained in (
            (one, [6, 7, 8], [True, False, True]),
            (one, [9], [True]),
            (other, [6], [True]),
            (one, [6], [True]),
            (([], []), [7, 7], [True, True]),
            (([], []), [7, 8], [True, True]),
        )
    ]

    batch = collate(rows, share_prompts=True)

    assert batch.input_ids.tolist() == [3, 4, 6, 7, 8, 9, 3, 5, 6, 3, 4, 6, 7, 7, 7, 8]
    assert batch.lengths == (2, 3, 1, 3, 3, 2, 2)
    assert batch.continues == (None, 0, 0, None, None, None, None)
    assert batch.targets.tolist() == [2, 4, 5, 8, 11, 13, 15]
    assert batch.before_targets.tolist() == [1, 3, 1, 7, 10, 12, 14]
    assert batch.longest == 5
    assert prompt_units(rows, max_tokens=8) == [[0, 1], [2], [3], [4, 5]]
    assert prompt_units(rows, max_tokens=7) == [[0], [1], [2], [3], [4, 5]]


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (4, 4), (3, 7), (1, 2)])
def test_every_row_comes_once_in_each_pass(num_rows: int, batch_size: int) -> None:
    stream = RowStream(num_rows=num_rows, batch_size=batch_size, seed=3)
    handed_out = [row for _ in range(num_rows * 4) for row in next(stream)]

    passes = [handed_out[at : at + num_rows] for at in range(0, 4 * num_rows, num_rows)]

    assert all(sorted(rows) == list(range(num_rows)) for rows in passes)
    assert num_rows < 5 or passes[0] != passes[1]


def test_a_stream_continues_where_another_stood() -> None:
    stream = RowStream(num_rows=5, batch_size=3, seed=1)
    for _ in range(4):
        next(stream)
    state = stream.state_dict()
    rest = [next(stream) for _ in range(4)]

    resumed = RowStream(num_rows=5, batch_size=3, seed=1)
    resumed.load_state_dict(state)

    assert [next(resumed) for _ in range(4)] == rest


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_in_one_micro_batch_of_one_process(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 50) for _ in range(rng.randint(1, 40))]
    max_tokens, num_processes = rng.randint(10, 200), rng.randint(1, 5)

    shares = [
        micro_batches(lengths, max_tokens=max_tokens, num_processes=num_processes, process=process)
        for process in range(num_processes)
    ]

    parts = [part for share in shares for part in share]
    assert Counter(row for part in parts for row in part) == Counter(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    # Only a row that is itself over the limit goes over it, and goes alone.
    assert all(sum(lengths[row] for row in part) <= max_tokens or len(part) == 1 for part in parts)


def test_with_a_least_number_any_processes_compute_the_same_micro_batches() -> None:
    def of(processes: int) -> list[list[int]]:
        shares = [
            micro_batches(
                [5, 1, 4, 2, 3],
                max_tokens=100,
                num_processes=processes,
                process=process,
                at_least=3,
            )
            for process in range(processes)
        ]
        return [part for turn in zip(*shares, strict=True) for part in turn]

    # 15 tokens in 3 parts of 5, the longest rows first; then nothing.
    assert of(1) == [[0], [1, 2], [3, 4]]
    assert of(2) == of(4) == [[0], [1, 2], [3, 4], []]
