"""Every causal language model of `transformers`: a batch equals each sequence alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.config import FrozenModelConfig
from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.models.forward.forward import Policy, is_ragged
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ModelError
from tests.every_family import (
    ALL_FAMILIES,
    DOCS,
    LISTED,
    NOT_LOADED,
    PACKED,
    UNSUPPORTED,
    classify,
    read_documented,
    tiny_model,
)
from tests.families import TRANSFORMERS, depends_on_later_tokens

LOCK = Path(__file__).parents[4] / "requirements.lock"

CPU = torch.device("cpu")
LENGTHS = (7, 3, 12, 5, 1, 6, 6)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-3}
"""Nats; of families with recurrent layers, which add up in another order by the batch's length. A
token too many or too few moves these models by 0.1 and more."""


def rows(*, seed: int) -> list[Encoded]:
    """Sequences of tokens that every family takes for text, in a sequence each once.

    Of equal ones Doge keeps some by the order in which torch.topk comes to them.
    """
    generator = torch.Generator().manual_seed(seed)
    return [
        Encoded((4 + torch.randperm(60, generator=generator)[:length]).tolist(), [True] * length)
        for length in LENGTHS
    ]


@pytest.mark.skipif(TRANSFORMERS != LISTED, reason="the documentation lists another transformers")
def test_the_list_of_the_documentation_has_every_family_of_transformers_once() -> None:
    assert sorted(read_documented()) == sorted(ALL_FAMILIES)


def test_the_documentation_says_which_transformers_it_lists() -> None:
    listed = ".".join(map(str, LISTED))

    assert f"of `transformers` {listed} by `model_type`" in DOCS.read_text(encoding="utf-8")
    assert f"transformers=={listed}." in LOCK.read_text(encoding="utf-8")


def hangs_on_length(model: PreTrainedModel) -> bool:
    """Return whether later tokens change plain `transformers`' output for a token."""
    ids = torch.tensor([rows(seed=0)[2].input_ids])
    whole = model(input_ids=ids).logits
    found = (model(input_ids=ids[:, :n]).logits - whole[:, :n] for n in range(1, ids.shape[1]))
    return max(each.abs().max().item() for each in found) > TOLERANCE["atol"]


def tiny_or_skip(family: str) -> PreTrainedModel:
    """A small model of a family; the settings below `tests` are those of the listed version."""
    try:
        model = tiny_model(family)
        model(input_ids=torch.tensor([rows(seed=0)[2].input_ids]))
    except Exception as error:
        if TRANSFORMERS == LISTED:
            raise
        pytest.skip(f"no small model of it with this transformers: {error}")
    return model


@pytest.mark.grid
@pytest.mark.parametrize("family", [family for family in ALL_FAMILIES if family not in UNSUPPORTED])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_a_batch_says_what_each_sequence_says_alone(family: str, tmp_path: Path) -> None:
    """In versions that the documentation doesn't list, too, or it is refused with reason."""
    tiny_or_skip(family).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    heading, _ = classify(family)
    if TRANSFORMERS == LISTED:
        assert classify(family) == read_documented()[family]
    elif heading == NOT_LOADED:
        assert depends_on_later_tokens(plain)
        with pytest.raises(ModelError, match=f"outputs of {family} depend on later tokens"):
            load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU)
        return
    elif hangs_on_length(plain):
        pytest.skip("what plain transformers says of a token hangs on how many follow")
    mine = rows(seed=0)
    alone: list[torch.Tensor] = []
    for row in mine:
        ids = torch.tensor(row.input_ids)
        logprobs = plain(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        alone.append(logprobs.gather(1, ids[1:, None])[:, 0].float())

    model = load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU)
    said = Policy(model)(collate(mine)).logprobs

    torch.testing.assert_close(said, torch.cat(alone), **TOLERANCE)
    assert is_ragged(model) == (heading == PACKED)
    # Other tokens in the third sequence, and another end of the last: the rest says the same.
    others = rows(seed=1)
    last = [*mine[-1].input_ids[:-1], mine[-1].input_ids[-1] ^ 1]
    changed = [*mine[:2], others[2], *mine[3:-1], Encoded(last, mine[-1].trained)]
    again = Policy(model)(collate(changed)).logprobs
    third = sum(length - 1 for length in LENGTHS[:2])
    kept = torch.ones(len(said), dtype=torch.bool)
    kept[third : third + LENGTHS[2] - 1] = False
    kept[-1] = False
    torch.testing.assert_close(again[kept], said[kept], **TOLERANCE)
    assert (again[~kept] - said[~kept]).abs().max() > 0.01


@pytest.mark.grid
@pytest.mark.parametrize("family", ["cpmant", "prophetnet", "xlnet"])
def test_a_family_that_sees_what_follows_is_refused(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=f"outputs of {family} depend on later tokens"):
        load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU)
