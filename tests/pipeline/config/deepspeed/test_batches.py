import pytest

from pipeline.config.deepspeed.batches import BatchSizes, resolve_batch_sizes
from pipeline.errors import ConfigError

Sizes = tuple[int | None, int | None, int | None]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((32, 4, 2), (32, 4, 2)),
        ((32, 4, None), (32, 4, 2)),
        ((32, None, 2), (32, 4, 2)),
        ((None, 4, 2), (32, 4, 2)),
        ((32, None, None), (32, 8, 1)),
        ((None, 4, None), (16, 4, 1)),
    ],
)
def test_what_is_missing_follows_on_4_processes(given: Sizes, expected: Sizes) -> None:
    assert resolve_batch_sizes(*given, world=4) == BatchSizes(*expected)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            (None, None, 2),
            "gradient_accumulation_steps 2 alone gives no batch size; add train_batch_size or"
            " train_micro_batch_size_per_gpu",
        ),
        (
            (33, 4, 2),
            "train_batch_size 33 is not train_micro_batch_size_per_gpu (4) x"
            " gradient_accumulation_steps (2) x 4 processes, which is 32; drop one of the three and"
            " it follows from the others",
        ),
        (
            (30, 4, None),
            "train_batch_size 30 can't be shared out as train_micro_batch_size_per_gpu (4) x"
            " gradient_accumulation_steps (no whole number) x 4 processes; choose a batch size that"
            " divides",
        ),
        (
            (30, None, 2),
            "train_batch_size 30 can't be shared out as train_micro_batch_size_per_gpu (no whole"
            " number) x gradient_accumulation_steps (2) x 4 processes; choose a batch size that"
            " divides",
        ),
        (
            (3, None, None),
            "train_batch_size 3 can't be shared out as train_micro_batch_size_per_gpu (no whole"
            " number) x gradient_accumulation_steps (1) x 4 processes; choose a batch size that"
            " divides",
        ),
        (  # more sequences in one forward pass of all processes than in the step
            (8, 4, None),
            "train_batch_size 8 can't be shared out as train_micro_batch_size_per_gpu (4) x"
            " gradient_accumulation_steps (no whole number) x 4 processes; choose a batch size that"
            " divides",
        ),
        ((32, 0, 2), "train_micro_batch_size_per_gpu must be above 0, got 0"),
        ((-8, 4, None), "train_batch_size must be above 0, got -8"),
        ((None, 4, 0), "gradient_accumulation_steps must be above 0, got 0"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(given: Sizes, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_batch_sizes(*given, world=4)

    assert str(error.value) == sentence


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_identity_holds_whatever_is_left_out(world: int) -> None:
    whole = BatchSizes(train=3 * 5 * world, micro=3, accumulation=5)

    for given in ((whole.train, 3, 5), (whole.train, 3, None), (whole.train, None, 5)):
        assert resolve_batch_sizes(*given, world=world) == whole
    assert resolve_batch_sizes(None, 3, 5, world=world) == whole
