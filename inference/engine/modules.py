"""A forward pass through a model's modules that stores into slots.

Dimension names: N tokens of it, K tokens whose logits are wanted, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from inference.engine.cache import SlotCache
from inference.engine.row_adapters import RowAdapters
from pipeline.models.attention import Layout
from pipeline.models.forward import cache_name


class Modules:
    """A model that stores into a cache of slots."""

    def __init__(
        self,
        model: nn.Module,
        cache: SlotCache,
        device: torch.device,
        adapters: RowAdapters | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self._kept = {cache_name(model): cache}
        self.adapters = adapters
        self.has_adapters = False
        """Whether a row of the next pass has one."""
        # transformers hands a 4-D mask through untouched; the layouts need none.
        self._no_mask = torch.ones(1, 1, 1, 1, device=device)

    def __call__(
        self,
        inputs: Int[Tensor, "4 N"],
        layout: Layout,
        *,
        reads_slots: bool = True,
        keep: int | Int[Tensor, " K"] = 0,
    ) -> Float[Tensor, "K V"]:
        """The logits after the tokens `keep`, or after all, of one forward pass.

        Args:
            inputs: tokens, their positions, their places in the cache and their adapters.
            layout: what each of them sees.
            reads_slots: see `SlotCache.begin`.
            keep: indices of tokens; 0 is all of them.
        """
        self.cache.begin(inputs[2], reads_slots=reads_slots)
        if self.adapters is not None:
            self.adapters.begin(inputs[3] if self.has_adapters else None)
        output = self.model(
            input_ids=inputs[:1],
            position_ids=inputs[1:2],
            attention_mask=self._no_mask,
            use_cache=True,
            ragged=layout,
            logits_to_keep=keep,
            **self._kept,
        )
        return output.logits[0]
