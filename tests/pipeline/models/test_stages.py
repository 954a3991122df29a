"""A model cut into stages says what it says whole, and what can't be cut says so."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline.data.batches import TokenBatch
from pipeline.errors import ConfigError, ModelError
from pipeline.models.attention import RAGGED
from pipeline.models.forward import Policy
from pipeline.models.packing import how_to_run
from pipeline.models.stages import Passage, blocks_of, cut_stage, order_of, require_exact
from tests.families import RAGGED_FAMILIES, VOCAB, tiny_causal_lm

PROJECTIONS = "opt with projections"
"""As OPT 350m is: embeddings are narrower than hidden states, and norms come after the sums."""


def model_of(family: str, blocks: int = 3) -> nn.Module:
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    own = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    changes = {name: blocks, **(own if family == PROJECTIONS else {})}
    model = tiny_causal_lm(family.partition(" ")[0], **changes)
    if how_to_run(model).packed:
        model.set_attn_implementation(RAGGED)
    return model.eval()


def batch() -> TokenBatch:
    ids = torch.randint(0, VOCAB, (16,), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids, (9, 7), torch.arange(1, 16))


@pytest.mark.parametrize("family", [*RAGGED_FAMILIES, PROJECTIONS])
def test_stages_of_every_packed_family_say_what_the_whole_model_says(family: str) -> None:
    whole = model_of(family)
    with torch.no_grad():
        expected = Policy(whole, kernels="off")(batch()).logprobs
    names = {name for name, _ in whole.named_parameters()}

    seen: list[str] = []
    hidden: Tensor | None = None
    for number in range(3):
        part = copy.deepcopy(whole)
        stage = cut_stage(part, number=number, blocks=[1, 1, 1])
        seen += [name for name, _ in part.named_parameters()]
        assert stage.is_first == (stage.chunks[0].inlet is None)
        if stage.chunks[0].inlet is not None:
            stage.chunks[0].inlet.received = hidden
        with torch.no_grad():
            if stage.is_last:
                found = Policy(part, kernels="off")(batch()).logprobs
            else:
                hidden = Passage(part, kernels="off")(batch())

    assert torch.equal(found, expected)
    assert sorted(seen) == sorted(names)  # each parameter once, under its own name


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_stages_of_two_chunks_say_what_the_whole_model_says(family: str) -> None:
    whole = model_of(family, blocks=5)
    with torch.no_grad():
        expected = Policy(whole, kernels="off")(batch()).logprobs
    parts = [copy.deepcopy(whole) for _ in range(2)]
    stages = [
        cut_stage(part, number=number, blocks=[1, 2, 1, 1], stages=2)
        for number, part in enumerate(parts)
    ]
    own = [dict(part.named_parameters()) for part in parts]

    hidden: Tensor | None = None
    for place in range(4):
        part, chunk = parts[place % 2], stages[place % 2].chunks[place // 2]
        assert (chunk.number, chunk.count) == (place, 4)
        assert chunk.is_first == (chunk.inlet is None)
        if chunk.inlet is not None:
            chunk.inlet.received = hidden
        with torch.no_grad(), chunk.at_work():
            if chunk.is_last:
                found = Policy(part, kernels="off")(batch()).logprobs
            else:
                hidden = Passage(part, kernels="off")(batch())

    assert torch.equal(found, expected)
    # After the passes each has its own parameters again, and each of the model's is on one.
    assert [dict(part.named_parameters()).keys() for part in parts] == [each.keys() for each in own]
    assert sorted([*own[0], *own[1]]) == sorted(name for name, _ in whole.named_parameters())


def test_a_family_that_runs_padded_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="bloom models run padded, not packed, and can't be cut"):
        cut_stage(model_of_two("bloom"), number=0, blocks=[1, 1])


def model_of_two(family: str) -> nn.Module:
    return tiny_causal_lm(family)


def test_a_model_whose_blocks_read_more_than_hidden_states_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")
    inner = type(model.model)
    plain = inner.forward

    def reads_embeddings(self: nn.Module, input_ids: Tensor, **kwargs: object) -> object:
        out = plain(self, input_ids=input_ids, **kwargs)
        out.last_hidden_state = out.last_hidden_state + self.embed_tokens(input_ids)
        return out

    monkeypatch.setattr(inner, "forward", reads_embeddings)
    order_of.cache_clear()
    require_exact.cache_clear()

    with pytest.raises(ModelError, match="llama models can't be cut into stages: "):
        cut_stage(model, number=1, blocks=[1, 2])


def test_blocks_are_those_asked_for_or_as_many_as_take_about_as_long() -> None:
    model = model_of("llama")

    assert blocks_of(model, 3) == [1, 1, 1]
    assert blocks_of(model, 2, (1, 2)) == [1, 2]
    assert blocks_of(model, 2) == [2, 1]  # the last stage has the head
    assert blocks_of(model_of("llama", 6), 2, chunks=2) == [1, 2, 2, 1]
    with pytest.raises(ConfigError, match="take 3 at most"):
        blocks_of(model, 4)
