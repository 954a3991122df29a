"""A model cut into stages says what it says whole, and what can't be cut says so."""

import copy
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

from pipeline.data.batches import TokenBatch
from pipeline.errors import ConfigError, ModelError
from pipeline.models.attention import RAGGED
from pipeline.models.forward import Policy
from pipeline.models.packing import how_to_run
from pipeline.models.stages import Passage, blocks_of, cut_stage, order_of, require_exact
from pipeline.parallel.partition import balanced
from tests.families import RAGGED_FAMILIES, VOCAB, tiny_causal_lm

THREE = {"gpt2": {"n_layer": 3}}


def model_of(family: str) -> nn.Module:
    model = tiny_causal_lm(family, **THREE.get(family, {"num_hidden_layers": 3}))
    if how_to_run(model).packed:
        model.set_attn_implementation(RAGGED)
    return model.eval()


def batch() -> TokenBatch:
    ids = torch.randint(0, VOCAB, (16,), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids, (9, 7), torch.arange(1, 16))


@pytest.mark.parametrize("family", RAGGED_FAMILIES)
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
        assert stage.is_first == (stage.inlet is None)
        if stage.inlet is not None:
            stage.inlet.received = hidden
        with torch.no_grad():
            if stage.is_last:
                found = Policy(part, kernels="off")(batch()).logprobs
            else:
                hidden = Passage(part, kernels="off")(batch())

    assert torch.equal(found, expected)
    assert sorted(seen) == sorted(names)  # each parameter once, under its own name


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
    with pytest.raises(ConfigError, match="take 3 at most"):
        blocks_of(model, 4)


@pytest.mark.parametrize("last", [0.0, 2.0, 9.0])
def test_the_slowest_stage_is_as_fast_as_can_be(last: float) -> None:
    draw = torch.Generator().manual_seed(3)
    for stages in range(1, 6):
        costs = torch.randint(1, 9, (8,), generator=draw).tolist()
        cuts = [(0, *each, 8) for each in combinations(range(1, 8), stages - 1)]

        def slowest(bounds: tuple[int, ...], costs: list[int] = costs) -> float:
            sums = [float(sum(costs[low:high])) for low, high in pairwise(bounds)]
            return max([*sums[:-1], sums[-1] + last])

        counts = balanced(costs, stages, last=last)
        found = (0, *torch.tensor(counts).cumsum(0).tolist())

        assert sum(counts) == 8
        assert min(counts) >= 1
        assert slowest(found) == min(map(slowest, cuts))
