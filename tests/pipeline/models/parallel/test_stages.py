"""A model split into stages equals the full one; one that can't be split is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline.data.batches import TokenBatch
from pipeline.engine.engine import Engine
from pipeline.models.forward.attention import RAGGED
from pipeline.models.forward.forward import Policy, Scorer
from pipeline.models.forward.packing import how_to_run
from pipeline.models.parallel.stages import Stage, StageModule, cut_stage, find_blocks
from pipeline.models.passes import StagedPasses, StagedScorer
from pipeline.parallel.group import SELF_GROUP
from pipeline.system.errors import ConfigError, ModelError
from tests.families import RAGGED_FAMILIES, VOCAB, tiny_causal_lm, tiny_classifier
from tests.pipeline.engine.test_stages import settings

PROJECTIONS = "opt with projections"
"""As OPT 350m is: embeddings are narrower than hidden states, and norms come after the sums."""


def make_model(family: str, blocks: int = 3) -> nn.Module:
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


@pytest.mark.parametrize("labels", [1, 3])
def test_a_pipeline_of_one_stage_has_the_scores_of_all_labels(labels: int) -> None:
    model = tiny_classifier("llama", vocab_size=VOCAB)
    model.config.num_labels, model.score = labels, nn.Linear(model.config.hidden_size, labels)
    scorer = Scorer(model)
    passes = StagedPasses(
        Engine(scorer, settings(0, max_norm=None), total_steps=1), Stage(), SELF_GROUP
    )

    with torch.no_grad():
        found = StagedScorer(passes, model)(batch(), labels=True)
        assert found.shape == (16, labels)
        assert torch.equal(found, scorer(batch(), labels=True))


@pytest.mark.parametrize("family", [*RAGGED_FAMILIES, PROJECTIONS])
def test_stages_of_every_packed_family_say_what_the_whole_model_says(family: str) -> None:
    whole = make_model(family)
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
                hidden = StageModule(part, kernels="off")(batch())

    assert torch.equal(found, expected)
    assert sorted(seen) == sorted(names)  # each parameter once, under its own name


def test_a_family_that_runs_padded_is_not_cut() -> None:
    with pytest.raises(ModelError, match=r"^falcon models run padded.*; set parallel.pp 1$"):
        cut_stage(tiny_causal_lm("falcon"), number=0, blocks=[1, 1])


def test_blocks_are_balanced() -> None:
    model = make_model("llama", blocks=5)
    assert find_blocks(model, 2) == [3, 2]
    with pytest.raises(ConfigError, match="is more than the 5 blocks"):
        find_blocks(model, 6)
