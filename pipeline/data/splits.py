"""Which split of a data set a step reads: `train`, or the one that is named for the step.

Sets for several steps name their splits as UltraFeedback does: train_sft, train_prefs, train_gen,
and test_sft, test_prefs, test_gen beside them.
"""

import re
from collections.abc import Collection, Sequence

from pipeline.errors import DataError

TRAIN_WORD = "train"
TEST_WORDS = ("test", "eval", "validation", "valid", "dev")

STEP_WORDS = {
    1: ("sft",),
    2: ("prefs", "pref", "preference", "preferences", "rm", "reward"),
    3: ("gen", "ppo", "rl", "prompts"),
}
"""What the name of a step's split says after `train_`."""


def is_test(name: str) -> bool:
    """Whether a file or split called `name` holds test rows: test, eval-00000-of-00002, dev_2."""
    return re.split(r"[-_.]", name.lower())[0] in TEST_WORDS


def split_of_file(parts: Sequence[str]) -> str:
    """The split that a file belongs to, by the parts of its path below the set's directory.

    `train_sft-00000-of-00003.parquet` is of train_sft, `test/a.jsonl` of test, any other of train.
    """
    for part in parts:
        words = re.split(r"[-_.]", part.lower().split(".")[0])
        if words[0] == TRAIN_WORD or words[0] in TEST_WORDS:
            kept = [word for word in words[1:] if word and not word.isdigit() and word != "of"]
            return "_".join([words[0], *kept])
    return TRAIN_WORD


def without_unknown_words(split: str) -> str:
    """`train` or `test`, and what names a step: train_sft, but train for train_b, test for dev."""
    word, _, rest = split.partition("_")
    word = "test" if word in TEST_WORDS else word
    return f"{word}_{rest}" if any(rest in words for words in STEP_WORDS.values()) else word


def choose_splits(
    name: str, splits: Collection[str], *, step: int | None, wanted: str | None = None
) -> tuple[str, list[str]]:
    """The training split that `step` reads, and the test splits that go with it, if any.

    That is `asked`, else `train`, else the only one whose name begins so, else the one that is
    named for the step.

    Raises:
        DataError: there is none, or there are several and none is named for the step.
    """
    if wanted is not None:
        if wanted not in splits:
            raise DataError(
                f"data path {name}@{wanted}: there is no split {wanted}; there are"
                f" {', '.join(sorted(splits))}"
            )
        return wanted, _test_splits(wanted, splits)
    train = [split for split in splits if split.startswith(TRAIN_WORD)]
    train = train or list(splits)[: len(splits) == 1]
    if TRAIN_WORD in train:
        return TRAIN_WORD, _test_splits(TRAIN_WORD, splits)
    if len(train) > 1:
        words = STEP_WORDS.get(step or 0, ())
        train = [split for split in train if split.removeprefix(TRAIN_WORD).strip("_-") in words]
    if len(train) != 1:
        raise DataError(_which_one(name, splits, step))
    return train[0], _test_splits(train[0], splits)


def _test_splits(train: str, splits: Collection[str]) -> list[str]:
    """The test split of the same name as `train`, else a plain one, else all where it is alone."""
    rest = train.removeprefix(TRAIN_WORD) if train.startswith(TRAIN_WORD) else ""
    for ending in dict.fromkeys((rest, "")):
        found = [word + ending for word in TEST_WORDS if word + ending in splits]
        if found and train not in found:
            return found[:1]
    others = [split for split in splits if split.startswith(TRAIN_WORD) and split != train]
    if others or is_test(train):
        return []
    return [split for split in splits if is_test(split)]


def _which_one(name: str, splits: Collection[str], step: int | None) -> str:
    train = sorted(split for split in splits if split.startswith(TRAIN_WORD))
    if train:
        of_step = f" and not one named for step {step}" if step else ""
        return (
            f"data path {name} has several training splits{of_step}: {', '.join(train)};"
            f" name the one to read, such as {name}@{train[0]}"
        )
    return (
        f"data path {name} has no train split, it has {', '.join(splits)}; name the one to read,"
        f" such as {name}@{next(iter(splits), 'train')}"
    )
