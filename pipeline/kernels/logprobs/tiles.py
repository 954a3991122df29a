"""Log-probabilities and entropy of given tokens, without the logits of all tokens at once.

The logits of K tokens over a vocabulary of V are by far the largest tensor of a model, and softmax
and its gradient make three more of it. Here only a tile of them exists at a time. There are two
ways back:

- *Again*: the forward pass goes through tiles of the vocabulary and keeps the logarithm of each
  token's sum; the backward pass computes the tiles again, one matrix product in four more than the
  plain way. A tile has all tokens, so that its rows of the matrix's gradient are final.
- *Ahead*: the forward pass goes through tiles of tokens and takes the gradients along, as if every
  log-probability weighed 1; the backward pass scales them. Nothing is computed twice. It serves
  where the output matrix doesn't learn, as under adapters, and where all tokens weigh the same, as
  in fine-tuning; if they turn out not to, the matrix's gradient is computed again.

Dimension names: K targets, d hidden size, V vocabulary; C targets or W words of a tile.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class RecomputeLogprobs(torch.autograd.Function):
    """Tiles of the vocabulary, computed again on the way back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: int,
        entropy: bool,  # noqa: FBT001  # torch passes by position
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and entropies if they are asked for."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.tile = temperature, tile
        sums = tile_sums(hidden, weight, bias, targets, temperature, tile, entropy=entropy)
        return of_sums(ctx, sums, (hidden, weight, bias, targets), entropy=entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of hidden states, matrix and bias."""
        of_logprobs, of_entropy = (None if grad is None else grad[:, None] for grad in grads)
        hidden, weight, bias, targets, largest, total, entropies = ctx.saved_tensors
        return *tile_gradients(
            (hidden, weight, bias),
            targets,
            (largest, total),
            of_logprobs,
            None if of_entropy is None else (of_entropy, entropies),
            wanted=ctx.needs_input_grad[:3],
            temperature=ctx.temperature,
            tile=ctx.tile,
        ), *[None] * 4


def tile_sums(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " K"],
    temperature: float,
    tile: int,
    *,
    entropy: bool,
) -> Float[Tensor, "4 K 1"]:
    """What log-probabilities follow from, by tiles of the vocabulary, fp32.

    With z the logits: that of each target, NaN where it is not a word of the matrix; the largest;
    the sum of exp(z - largest); and of (z - largest) times that, or 0 without `entropy`.
    """
    # What no tile has stays NaN: a target that is not a word must not go unnoticed.
    chosen = hidden.new_full((len(targets), 1), float("nan"), dtype=torch.float32)
    # Not -inf, from which a tile that is nothing else could not be subtracted.
    largest = torch.full_like(chosen, torch.finfo(torch.float32).min)
    total, weighted = torch.zeros_like(chosen), torch.zeros_like(chosen)
    for words in _vocabulary_tiles(weight, len(targets), tile):
        logits = _logits(hidden, weight, bias, words, temperature)
        here, places = _targets_in(targets, words)
        chosen = torch.where(here, logits.gather(1, places), chosen)
        before, largest = largest, torch.maximum(largest, logits.amax(dim=1, keepdim=True))
        shrunk = (before - largest).exp()
        if entropy:
            moved = torch.where(total > 0, total * (before - largest), total)
            weighted = (weighted + moved) * shrunk
        exponentials = logits.sub_(largest).exp() if entropy else logits.sub_(largest).exp_()
        total = total * shrunk + exponentials.sum(dim=1, keepdim=True)
        if entropy:
            weighted = weighted + exponentials.mul_(logits).sum(dim=1, keepdim=True)
        del logits, exponentials  # before the next tile is made
    return torch.stack([chosen, largest, total, weighted])


def of_sums(
    ctx: Any,  # noqa: ANN401
    sums: Float[Tensor, "4 T 1"],
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    *,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and entropies if they are asked for, from `tile_sums` over all words.

    In `ctx` is kept what the gradients need: the inputs, and what the distributions follow from.
    """
    chosen, largest, total, weighted = sums
    entropies = total.log() - weighted / total if entropy else None
    ctx.save_for_backward(*inputs, largest, total, entropies)
    logprobs = (chosen - largest - total.log()).squeeze(1)
    return logprobs, None if entropies is None else entropies.squeeze(1)


class FusedGradLogprobs(torch.autograd.Function):
    """Tiles of tokens, their gradients computed on the way forth."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: int,
    ) -> Tensor:
        """Log-probabilities."""
        ctx.temperature, ctx.tile = temperature, tile
        wanted = ctx.needs_input_grad
        logprobs = hidden.new_empty(len(targets), 1, dtype=torch.float32)
        largest, total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        of_bias = hidden.new_zeros(len(weight), dtype=torch.float32) if wanted[2] else None
        rows = max(1, tile // len(weight))
        for part in _slices(len(targets), rows):
            target = targets[part, None]
            logits = _logits(hidden[part], weight, bias, slice(None), temperature)
            largest[part] = logits.amax(dim=1, keepdim=True)
            grad = logits.sub_(largest[part])
            chosen = grad.gather(1, target)
            total[part] = grad.exp_().sum(dim=1, keepdim=True)
            logprobs[part] = chosen - total[part].log()
            grad.mul_(-1 / (total[part] * temperature))
            grad.scatter_add_(1, target, torch.full_like(chosen, 1 / temperature))
            grad = grad.to(weight.dtype)
            if of_hidden is not None:
                torch.mm(grad, weight, out=of_hidden[part])
            if of_weight is not None:
                _add_product(of_weight, grad.t(), hidden[part])
            if of_bias is not None:
                of_bias += grad.sum(dim=0, dtype=torch.float32)
            del logits, grad
        ctx.save_for_backward(hidden, weight, bias, targets, largest, total)
        # Not inputs or outputs, and so not for `save_for_backward`.
        ctx.ahead = of_hidden, of_weight, of_bias
        return logprobs.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of hidden states, matrix and bias."""
        hidden, weight, bias, targets, largest, total = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        matrix_learns = wanted[1] or wanted[2]
        same = not matrix_learns or _is_uniform(grad)
        if ctx.ahead is None or not same:
            return *tile_gradients(
                (hidden, weight, bias),
                targets,
                (largest, total),
                grad[:, None],
                None,
                wanted=wanted[:3],
                temperature=ctx.temperature,
                tile=ctx.tile,
            ), *[None] * 3
        (of_hidden, of_weight, of_bias), ctx.ahead = ctx.ahead, None  # it is scaled in place, once
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(grad[:, None])
        of_weight, of_bias = (
            None if each is None else each.mul_(grad[0]).to(weight.dtype)
            for each in (of_weight, of_bias)
        )
        return of_hidden, of_weight, of_bias, *[None] * 3


def _is_uniform(grad: Float[Tensor, " K"]) -> bool:
    """Whether all are one number; on a GPU nobody waits for the answer: a no ends the process."""
    first = grad[:1]
    if not grad.is_cuda:
        return torch.equal(grad, first.expand_as(grad))
    same = (grad == first) | (grad.isnan() & first.isnan())
    sentence = "the tokens of a pass that is `uniform` have other gradients"
    torch.ops.aten._assert_async.msg(same.all(), sentence)  # noqa: SLF001
    return True


def tile_gradients(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    targets: Int[Tensor, " K"],
    sums: tuple[Float[Tensor, "K 1"], Float[Tensor, "K 1"]],
    of_logprobs: Float[Tensor, "K 1"] | None,
    of_entropy: tuple[Float[Tensor, "K 1"], Float[Tensor, "K 1"]] | None,
    *,
    wanted: tuple[bool, ...],
    temperature: float,
    tile: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of hidden states, matrix and bias, as far as they are wanted.

    With z the logits, p = softmax(z), H the entropy, t the target, and g and h the gradients of
    log p_t and of H:  dz = g * (1[t] - p) - h * p * (log p + H).

    Args:
        inputs: hidden states, matrix and bias.
        targets: token ids.
        sums: the largest logit z_max of each target, and the sum of exp(z - z_max).
        of_logprobs: g, or None for zeros.
        of_entropy: h and H, or None for zeros.
        wanted: whether each of the inputs wants a gradient.
        temperature: divides the logits.
        tile: logits of a tile.
    """
    hidden, weight, bias = inputs
    largest, total = sums
    of_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
    of_weight = torch.empty_like(weight) if wanted[1] else None
    of_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None
    for words in _vocabulary_tiles(weight, len(targets), tile):
        shifted = _logits(hidden, weight, bias, words, temperature).sub_(largest)
        grad = shifted.exp_() if of_entropy is None else shifted.exp()
        if of_entropy is None:
            grad.mul_(0.0 if of_logprobs is None else -of_logprobs / (total * temperature))
        else:
            share = shifted.add_(of_entropy[1] - total.log()).mul_(of_entropy[0])
            if of_logprobs is not None:
                share.add_(of_logprobs)
            grad.mul_(share.div_(-total * temperature))
            del share
        del shifted
        if of_logprobs is not None:
            here, places = _targets_in(targets, words)
            grad.scatter_add_(1, places, torch.where(here, of_logprobs / temperature, 0.0))
        grad = grad.to(weight.dtype)
        if of_hidden is not None:
            _add_product(of_hidden, grad, weight[words])
        if of_weight is not None:
            torch.mm(grad.t(), hidden, out=of_weight[words])
        if of_bias is not None:
            of_bias[words] = grad.sum(dim=0)
        del grad
    return None if of_hidden is None else of_hidden.to(hidden.dtype), of_weight, of_bias


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _vocabulary_tiles(weight: Float[Tensor, "V d"], count: int, tile: int) -> list[slice]:
    return _slices(len(weight), max(1, tile // count))


def _logits(
    hidden: Float[Tensor, "C d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    words: slice,
    temperature: float,
) -> Float[Tensor, "C W"]:
    """Logits in fp32, in memory of their own."""
    logits = F.linear(hidden, weight[words], None if bias is None else bias[words]).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _targets_in(targets: Int[Tensor, " K"], words: slice) -> tuple[Tensor, Tensor]:
    """Which targets are among the words, and their places there, 0 of the others; each (K, 1)."""
    here = ((targets >= words.start) & (targets < words.stop))[:, None]
    return here, torch.where(here, targets[:, None] - words.start, 0)


def _add_product(
    total: Float[Tensor, "A B"], left: Float[Tensor, "A C"], right: Float[Tensor, "C B"]
) -> None:
    """Add left @ right to a sum in fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
