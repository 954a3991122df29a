"""Batches match separate sequences in every causal language model of `transformers`."""

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
"""Nats. Recurrent layers sum in an order that depends on the batch's length. One token too many or
too few changes the outputs of these models by 0.1 or more."""


def rows(*, seed: int) -> list[Encoded]:
    """Return sequences of distinct tokens that are text in every family."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Encoded((4 + torch.randperm(60, generator=generator)[:length]).tolist(), [True] * length)
        for length in LENGTHS
    ]


@pytest.mark.skipif(TRANSFORMERS != LISTED, reason="the documentation lists another transformers")
def test_documentation_lists_every_family_of_transformers_once() -> None:
    assert sorted(read_documented()) == sorted(ALL_FAMILIES)


def test_documentation_states_the_version_of_transformers() -> None:
    listed = ".".join(map(str, LISTED))

    assert f"of `transformers` {listed} by `model_type`" in DOCS.read_text(encoding="utf-8")
    assert f"transformers=={listed}." in LOCK.read_text(encoding="utf-8")


def depends_on_length(model: PreTrainedModel) -> bool:
    """Return whether later tokens change plain `transformers`' output for a token."""
    ids = torch.tensor([rows(seed=0)[2].input_ids])
    full = model(input_ids=ids).logits
    errors = (model(input_ids=ids[:, :n]).logits - full[:, :n] for n in range(1, ids.shape[1]))
    return max(error.abs().max().item() for error in errors) > TOLERANCE["atol"]


def tiny_or_skip(family: str) -> PreTrainedModel:
    """Return a small model of a family, whose settings are those of the listed version."""
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
def test_batch_matches_separate_sequences(family: str, tmp_path: Path) -> None:
    """Also in unlisted versions, unless the model is refused."""
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
    elif depends_on_length(plain):
        pytest.skip("outputs of plain transformers depend on later tokens")
    batch_rows = rows(seed=0)
    separate: list[torch.Tensor] = []
    for row in batch_rows:
        ids = torch.tensor(row.input_ids)
        logprobs = plain(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        separate.append(logprobs.gather(1, ids[1:, None])[:, 0].float())

    model = load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU)
    logprobs = Policy(model)(collate(batch_rows)).logprobs

    torch.testing.assert_close(logprobs, torch.cat(separate), **TOLERANCE)
    assert is_ragged(model) == (heading == PACKED)
    # Changes to the third sequence and to the last token affect no other output.
    other_rows = rows(seed=1)
    last = [*batch_rows[-1].input_ids[:-1], batch_rows[-1].input_ids[-1] ^ 1]
    changed = list(batch_rows)
    changed[2], changed[-1] = other_rows[2], Encoded(last, batch_rows[-1].trained)
    changed_logprobs = Policy(model)(collate(changed)).logprobs
    third = sum(length - 1 for length in LENGTHS[:2])
    unaffected = torch.ones(len(logprobs), dtype=torch.bool)
    unaffected[third : third + LENGTHS[2] - 1] = False
    unaffected[-1] = False
    torch.testing.assert_close(changed_logprobs[unaffected], logprobs[unaffected], **TOLERANCE)
    assert (changed_logprobs[~unaffected] - logprobs[~unaffected]).abs().max() > 0.01


@pytest.mark.grid
@pytest.mark.parametrize("family", ["cpmant", "prophetnet", "xlnet"])
def test_family_that_attends_to_later_tokens_raises(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=f"outputs of {family} depend on later tokens"):
        load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU)
