"""A scorer whose model is cut into stages, for evaluations: its outputs are on all of them.

Dimension names: N tokens of a batch, C outputs of a token.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.data.batches import TokenBatch
from pipeline.models.cutpoints import Cutpoints
from pipeline.models.forward import Scorer
from pipeline.models.passes import Passes, StagedPasses


class StagedScorer(Scorer):
    """Runs a batch through the stages, one after the other; all processes of them call it together.

    Args:
        passes: of the stages.
        model: the Hugging Face model, of which this process has a stage.
        cutpoints: the last stage's learn; on the others they have the same number.
    """

    def __init__(self, passes: StagedPasses, model: nn.Module, cutpoints: Cutpoints | None) -> None:
        super().__init__(model, cutpoints=cutpoints)
        self._passes = passes
        self._part = passes.engine.model

    def thresholds(self) -> Float[Tensor, " cuts"] | None:
        """The thresholds of the last stage."""
        own = super().thresholds()
        return None if own is None else self._passes.shared(own.detach().clone())

    def _logits(self, classifier: PreTrainedModel, batch: TokenBatch) -> Float[Tensor, "N C"]:
        num_labels = int(classifier.config.num_labels or 1)
        out = torch.empty(batch.num_tokens, num_labels, device=batch.input_ids.device)
        return self._passes.everywhere(batch, lambda: self._of_last(batch), out)

    def _of_last(self, batch: TokenBatch) -> Float[Tensor, "N C"]:
        assert isinstance(self._part, Scorer)
        return self._part(batch, labels=True).logits


def scorer_of(passes: Passes, model: nn.Module, cutpoints: Cutpoints | None) -> Scorer:
    """What evaluations ask for scores: the scorer that learns, or one over its stages."""
    if isinstance(passes, StagedPasses):
        return StagedScorer(passes, model, cutpoints)
    assert isinstance(passes.engine.model, Scorer)
    return passes.engine.model
