"""Collation of rows, their order, and micro-batches."""

import random
from collections import Counter

import pytest

from pipeline.data.batches import RowStream, collate, micro_batches, prompt_units
from pipeline.data.examples import Encoded


def test_collate_packs_sequences_and_never_trains_first_tokens() -> None:
    batch = collate(
        [Encoded([5, 6, 7], [True, False, True]), Encoded([8], [True]), Encoded([9, 5], [True] * 2)]
    )

    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 5]
    assert batch.lengths == (3, 1, 2)
    assert batch.targets.tolist() == [2, 5]
    assert batch.last_tokens.tolist() == [2, 3, 5]
    assert (batch.num_tokens, batch.num_targets) == (6, 2)


def test_rows_with_equal_prompts_share_one_copy() -> None:
    first_prompt, second_prompt = ([3, 4], [False, False]), ([3, 5], [False, False])
    rows = [
        Encoded(prompt + ids, untrained + trained)
        for (prompt, untrained), ids, trained in (
            (first_prompt, [6, 7, 8], [True, False, True]),
            (first_prompt, [9], [True]),
            (second_prompt, [6], [True]),
            (first_prompt, [6], [True]),
            (([], []), [7, 7], [True, True]),
            (([], []), [7, 8], [True, True]),
        )
    ]

    batch = collate(rows)

    assert batch.input_ids.tolist() == [3, 4, 6, 7, 8, 9, 3, 5, 6, 3, 4, 6, 7, 7, 7, 8]
    assert batch.lengths == (2, 3, 1, 3, 3, 2, 2)
    assert batch.continues == (None, 0, 0, None, None, None, None)
    assert batch.targets.tolist() == [2, 4, 5, 8, 11, 13, 15]
    assert batch.before_targets.tolist() == [1, 3, 1, 7, 10, 12, 14]
    assert batch.last_tokens.tolist() == [4, 5, 8, 11, 13, 15]
    assert batch.longest == 5
    assert prompt_units(rows, max_tokens=8) == [[0, 1], [2], [3], [4, 5]]
    assert prompt_units(rows, max_tokens=7) == [[0], [1], [2], [3], [4, 5]]


@pytest.mark.parametrize(("num_rows", "batch_size"), [(10, 3), (4, 4), (3, 7), (1, 2)])
def test_row_stream_yields_every_row_once_per_epoch(num_rows: int, batch_size: int) -> None:
    stream = RowStream(num_rows=num_rows, batch_size=batch_size, seed=3)
    rows = [row for _ in range(num_rows * 4) for row in next(stream)]

    epochs = [rows[start : start + num_rows] for start in range(0, 4 * num_rows, num_rows)]

    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert num_rows < 5 or epochs[0] != epochs[1]


def test_row_stream_resumes_from_its_state() -> None:
    stream = RowStream(num_rows=5, batch_size=3, seed=1)
    for _ in range(4):
        next(stream)
    state = stream.state_dict()
    expected = [next(stream) for _ in range(4)]

    resumed = RowStream(num_rows=5, batch_size=3, seed=1)
    resumed.load_state_dict(state)

    assert [next(resumed) for _ in range(4)] == expected


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_in_exactly_one_micro_batch(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 50) for _ in range(rng.randint(1, 40))]
    max_tokens, num_processes = rng.randint(10, 200), rng.randint(1, 5)

    shards = [
        micro_batches(lengths, max_tokens=max_tokens, num_processes=num_processes, process=process)
        for process in range(num_processes)
    ]

    batches = [batch for shard in shards for batch in shard]
    assert Counter(row for batch in batches for row in batch) == Counter(range(len(lengths)))
    assert len({len(shard) for shard in shards}) == 1
    # Only a single row that is longer than the limit may exceed it.
    assert all(sum(lengths[i] for i in batch) <= max_tokens or len(batch) == 1 for batch in batches)


def test_min_count_gives_any_process_count_the_same_micro_batches() -> None:
    def compute_micro_batches(processes: int) -> list[list[int]]:
        shards = [
            micro_batches(
                [5, 1, 4, 2, 3],
                max_tokens=100,
                num_processes=processes,
                process=process,
                min_count=3,
            )
            for process in range(processes)
        ]
        return [batch for batches in zip(*shards, strict=True) for batch in batches]

    # 15 tokens in 3 micro-batches of 5, the longest rows first; then an empty one.
    assert compute_micro_batches(1) == [[0], [1, 2], [3, 4]]
    assert compute_micro_batches(2) == compute_micro_batches(4) == [[0], [1, 2], [3, 4], []]
