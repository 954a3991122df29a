"""A model that is split into stages equals the full one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline.data.batches import TokenBatch
from pipeline.engine.engine import Engine
from pipeline.models.forward.attention import RAGGED
from pipeline.models.forward.forward import Policy, Scorer
from pipeline.models.forward.packing import detect_batching
from pipeline.models.parallel.stages import PipelineStage, StageModule, balance_blocks, build_stage
from pipeline.models.passes import StagedPasses, StagedScorer
from pipeline.parallel.group import SELF_GROUP
from pipeline.system.errors import ConfigError, ModelError
from tests.families import RAGGED_FAMILIES, VOCAB, tiny_causal_lm, tiny_classifier
from tests.pipeline.engine.test_stages import settings

PROJECTIONS = "opt with projections"
"""Like OPT-350m: embeddings are narrower than hidden states, and norms follow the residuals."""


def make_model(family: str, blocks: int = 3) -> nn.Module:
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    projections = {"word_embed_proj_dim": 16, "do_layer_norm_before": False}
    changes = {name: blocks, **(projections if family == PROJECTIONS else {})}
    model = tiny_causal_lm(family.partition(" ")[0], **changes)
    if detect_batching(model).packed:
        model.set_attn_implementation(RAGGED)
    return model.eval()


def make_batch() -> TokenBatch:
    ids = torch.randint(0, VOCAB, (16,), generator=torch.Generator().manual_seed(1))
    return TokenBatch(ids, (9, 7), torch.arange(1, 16))


@pytest.mark.parametrize("labels", [1, 3])
def test_pipeline_of_one_stage_scores_all_labels(labels: int) -> None:
    model = tiny_classifier("llama", vocab_size=VOCAB)
    model.config.num_labels, model.score = labels, nn.Linear(model.config.hidden_size, labels)
    engine = Engine(Scorer(model), settings(0, max_norm=None), total_steps=1)
    passes = StagedPasses(engine, PipelineStage(), SELF_GROUP)

    with torch.no_grad():
        scores = StagedScorer(passes, model)(make_batch(), labels=True)
        assert scores.shape == (16, labels)
        assert torch.equal(scores, engine.model(make_batch(), labels=True))


@pytest.mark.parametrize("family", [*RAGGED_FAMILIES, PROJECTIONS])
def test_stages_of_packed_families_match_the_full_model(family: str) -> None:
    model = make_model(family)
    with torch.no_grad():
        expected = Policy(model, kernels="off")(make_batch()).logprobs
    names = {name for name, _ in model.named_parameters()}

    stage_names: list[str] = []
    hidden: Tensor | None = None
    for number in range(3):
        stage_model = copy.deepcopy(model)
        stage = build_stage(stage_model, number=number, blocks=[1, 1, 1])
        stage_names += [name for name, _ in stage_model.named_parameters()]
        assert stage.is_first == (stage.stage_input is None)
        if stage.stage_input is not None:
            stage.stage_input.received = hidden
        with torch.no_grad():
            if stage.is_last:
                logprobs = Policy(stage_model, kernels="off")(make_batch()).logprobs
            else:
                hidden = StageModule(stage_model, kernels="off")(make_batch())

    assert torch.equal(logprobs, expected)
    assert sorted(stage_names) == sorted(names)  # each parameter once, under its original name


def test_splitting_a_padded_family_raises() -> None:
    with pytest.raises(ModelError, match=r"they run padded, not packed; set parallel.pp to 1$"):
        build_stage(tiny_causal_lm("falcon"), number=0, blocks=[1, 1])


def test_blocks_are_balanced_over_stages() -> None:
    model = make_model("llama", blocks=5)
    assert balance_blocks(model, 2) == [3, 2]
    with pytest.raises(ConfigError, match="but the model has only 5 blocks"):
        balance_blocks(model, 6)
