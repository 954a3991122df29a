"""Log-probabilities and entropies of given tokens, without storing the logits of all tokens.

The logits of K tokens over a vocabulary of V are by far the largest tensor of a model, and softmax
and its gradient need three more of that size. Here only one tile exists at a time. There are two
kinds of backward pass:

- `RecomputeLogprobs`: the forward pass computes tiles of the vocabulary and saves each token's
  log-sum-exp; the backward pass recomputes the tiles: four matrix products instead of
  three. A tile has all tokens, so that its rows of the weight's gradient are final.
- `FusedGradLogprobs`: the forward pass computes tiles of tokens and their gradients, as if every
  log-probability had weight 1; the backward pass scales them. Nothing is computed twice. It is used
  where the output layer isn't trained, as with adapters, and where all tokens have the same
  weight, as in fine-tuning; if they differ after all, gradients are computed again on a CPU.

`RowLogprobs` does the same from existing logits, a few rows at a time. All is plain PyTorch and
needs no compiler. Dimension names: K targets, d hidden size, V vocabulary; C targets or W words of
a tile.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.parallel.group import Group, tree_sum

NO_TARGET = -(2**31)
"""`ignore_index` of PyTorch's loss, whose default -100 would hide a wrong target."""

_softmax_gradient = torch.ops.aten._log_softmax_backward_data  # noqa: SLF001

TILE = {"cpu": 2**23, "cuda": 2**26}
"""Logits per tile of tokens, by device: 32 and 256 MiB of fp32. Smaller tiles add to the matrix's
gradient more often; larger ones are not faster."""

VOCABULARY_TILE = {"cpu": 2**21, "cuda": TILE["cuda"]}
"""Logits per tile of the vocabulary: 8 MiB of fp32 stay in a CPU's last-level cache."""

WHOLE = 2**26
"""Maximum number of logits computed at once: 256 MiB of fp32."""

ROWS = {"cpu": 2**20, "cuda": TILE["cuda"]}
"""Logits of the rows computed at once, by device: 4 and 256 MiB of fp32."""


@dataclass(frozen=True)
class Words:
    """The vocabulary rows of an embedding or output layer that this process holds."""

    first: int
    """Token id of the first row."""

    group: Group
    """The processes, each with an equal share of the rows."""


def logprobs_of(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float,
    entropy: bool,
    entropy_learns: bool = True,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probabilities from logits, which `temperature` divides; nats, fp32.

    If `entropy_learns` is false, the entropy has no graph, which would be as large as the logits.
    """
    all_logprobs = _log_softmax(logits, temperature)
    logprobs = -F.nll_loss(all_logprobs, targets, ignore_index=NO_TARGET, reduction="none")
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_learns):
        return logprobs, -(all_logprobs.exp() * all_logprobs).sum(dim=-1)


def linear_logprobs(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_learns: bool = True,
    uniform: bool = False,
    tile: int | None = None,
    words: Words | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probability of each target under softmax(hidden @ weight.T + bias), and the entropy.

    Args:
        hidden: hidden states that predict the targets, in the dtype of the weights.
        weight: the output layer.
        bias: bias of the output, or None.
        targets: token ids.
        temperature: divides the logits.
        entropy: whether to compute the entropy of each distribution.
        entropy_learns: whether the entropy is part of a loss; less memory is needed if not.
        uniform: whether all log-probabilities have the same weight in the loss, which is faster.
        tile: logits per tile; by default `TILE` or `VOCABULARY_TILE`, or a single tile for up to
            `WHOLE` logits.
        words: the vocabulary range of `weight`, if it is sharded; the function is then a
            collective.

    Returns:
        Log-probabilities and entropies in nats, fp32; None without `entropy`.
        Logits are rounded to the weights' dtype, as in the model itself; what follows is fp32. With
            one tile the result is bitwise that of `logprobs_of`; with several, the order of sums
            differs.
    """
    is_sharded = words is not None and len(targets) > 0
    if not is_sharded and len(targets) * len(weight) <= (WHOLE if tile is None else tile):
        return logprobs_of(
            F.linear(hidden, weight, bias),
            targets,
            temperature=temperature,
            entropy=entropy,
            entropy_learns=entropy_learns,
        )
    matrix_learns = weight.requires_grad or (bias is not None and bias.requires_grad)
    fuses = torch.is_grad_enabled() and not entropy and (uniform or not matrix_learns)
    if fuses and not is_sharded:
        tile = tile or TILE.get(weight.device.type, TILE["cpu"])
        return FusedGradLogprobs.apply(hidden, weight, bias, targets, temperature, tile), None
    tile = tile or VOCABULARY_TILE.get(weight.device.type, VOCABULARY_TILE["cpu"])
    settings = (temperature, tile, entropy, words if is_sharded else None)
    return RecomputeLogprobs.apply(hidden, weight, bias, targets, *settings)


def row_logprobs(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    at_once: int | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Log-probability of each target under softmax(logits), and the entropy.

    Args:
        logits: logits of any dtype, which must not change until the backward pass.
        targets: token ids.
        temperature: divides the logits.
        entropy: whether to compute the entropy of each distribution; it has no graph.
        at_once: maximum logits of the rows computed at once, but at least two rows; by default
            `ROWS`.

    Returns:
        Log-probabilities and entropies in nats, fp32; None without `entropy`.
    """
    at_once = at_once or ROWS.get(logits.device.type, ROWS["cpu"])
    return RowLogprobs.apply(logits, targets, temperature, entropy, at_once)


class RecomputeLogprobs(torch.autograd.Function):
    """Log-probabilities in tiles of the vocabulary, recomputed in the backward pass.

    With a sharded vocabulary, the target's logit, the largest logit and the sum of exponentials are
    combined over the processes as over tiles, so no process has the logits of the full vocabulary.
    Sums over processes are trees in rank order.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        tile: int,
        entropy: bool,  # noqa: FBT001  # autograd passes positional arguments
        words: Words | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and entropies with `entropy`."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.tile, ctx.words = temperature, tile, words
        local = targets if words is None else targets - words.first
        sums = _tile_sums(hidden, weight, bias, local, temperature, tile, entropy=entropy)
        if words is not None:
            sums = _combine_sums(sums, words.group)
        chosen, largest, total, weighted = sums
        entropies = total.log() - weighted / total if entropy else None
        ctx.save_for_backward(hidden, weight, bias, local, largest, total, entropies)
        logprobs = (chosen - largest - total.log()).squeeze(1)
        return logprobs, None if entropies is None else entropies.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of hidden states, weight and bias."""
        of_logprobs, of_entropy = (None if grad is None else grad[:, None] for grad in grads)
        hidden, weight, bias, targets, largest, total, entropies = ctx.saved_tensors
        of_hidden, of_weight, of_bias = _tile_gradients(
            (hidden, weight, bias),
            targets,
            (largest, total),
            of_logprobs,
            None if of_entropy is None else (of_entropy, entropies),
            wanted=ctx.needs_input_grad[:3],
            temperature=ctx.temperature,
            tile=ctx.tile,
        )
        if ctx.words is not None and of_hidden is not None:
            parts = ctx.words.group.all_gather(of_hidden, label="gradients of hidden states")
            of_hidden = tree_sum(parts)
        return of_hidden, of_weight, of_bias, *[None] * 5


def _tile_sums(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " K"],
    temperature: float,
    tile: int,
    *,
    entropy: bool,
) -> Float[Tensor, "4 K 1"]:
    """Logit statistics by tiles of the vocabulary, fp32.

    With z the logits: z of each target, NaN if it is outside this vocabulary range; the largest z;
    the sum of exp(z - largest); and the sum of (z - largest) exp(z - largest), or 0 without
    `entropy`.
    """
    chosen = hidden.new_full((len(targets), 1), float("nan"), dtype=torch.float32)
    # Not -inf: for a tile of -inf, the difference would be NaN.
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
        del logits, exponentials  # free memory before the next tile
    return torch.stack([chosen, largest, total, weighted])


def _combine_sums(local: Float[Tensor, "4 K 1"], group: Group) -> Float[Tensor, "4 K 1"]:
    """Combine the statistics of the vocabulary ranges of all processes."""
    of_all = torch.stack(group.all_gather(local, label="sums of logits"))
    chosen, largest, total, weighted = of_all.unbind(dim=1)
    has_target = ~chosen.isnan()
    one = torch.where(has_target, chosen, 0.0).sum(dim=0)
    most = largest.amax(dim=0)
    shrunk = (largest - most).exp()
    moved = weighted + total * (largest - most)
    return torch.stack(
        [
            torch.where(has_target.any(dim=0), one, float("nan")),
            most,
            tree_sum(list(total * shrunk)),
            tree_sum(list(moved * shrunk)),
        ]
    )


class FusedGradLogprobs(torch.autograd.Function):
    """Log-probabilities in tiles of tokens, with gradients computed in the forward pass."""

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
        # save_for_backward takes only inputs and outputs.
        ctx.ahead = of_hidden, of_weight, of_bias
        return logprobs.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        """Gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, largest, total = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        matrix_learns = wanted[1] or wanted[2]
        same = not matrix_learns or _is_uniform(grad)
        if ctx.ahead is None or not same:
            return *_tile_gradients(
                (hidden, weight, bias),
                targets,
                (largest, total),
                grad[:, None],
                None,
                wanted=wanted[:3],
                temperature=ctx.temperature,
                tile=ctx.tile,
            ), *[None] * 3
        (of_hidden, of_weight, of_bias), ctx.ahead = ctx.ahead, None  # scaled in place, once
        if of_hidden is not None:
            of_hidden = of_hidden.mul_(grad[:, None])
        of_weight, of_bias = (
            None if part is None else part.mul_(grad[0]).to(weight.dtype)
            for part in (of_weight, of_bias)
        )
        return of_hidden, of_weight, of_bias, *[None] * 3


def _is_uniform(grad: Float[Tensor, " K"]) -> bool:
    """True if all are equal; on a GPU, which is not waited for, a difference ends the process."""
    first = grad[:1]
    if not grad.is_cuda:
        return torch.equal(grad, first.expand_as(grad))
    same = (grad == first) | (grad.isnan() & first.isnan())
    sentence = "gradients differ between tokens in a pass declared `uniform`"
    torch.ops.aten._assert_async.msg(same.all(), sentence)  # noqa: SLF001
    return True


def _tile_gradients(
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
    """The gradients of hidden states, matrix and bias that are `wanted`.

    With z the logits, p = softmax(z), H the entropy, t the target, and g and h the gradients of
    log p_t and of H:  dz = g * (1[t] - p) - h * p * (log p + H).

    Args:
        inputs: hidden states, matrix and bias.
        targets: token ids.
        sums: the largest logit z_max of each target, and the sum of exp(z - z_max).
        of_logprobs: g, or None for zeros.
        of_entropy: h and H, or None for zeros.
        wanted: whether each of the inputs needs a gradient.
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
    """A copy of the logits in fp32."""
    logits = F.linear(hidden, weight[words], None if bias is None else bias[words]).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _targets_in(targets: Int[Tensor, " K"], words: slice) -> tuple[Tensor, Tensor]:
    """Mask (K, 1) of the targets in this vocabulary range, and their indices in it, else 0."""
    here = ((targets >= words.start) & (targets < words.stop))[:, None]
    return here, torch.where(here, targets[:, None] - words.start, 0)


def _add_product(
    total: Float[Tensor, "A B"], left: Float[Tensor, "A C"], right: Float[Tensor, "C B"]
) -> None:
    """Add left @ right to an fp32 sum."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


class RowLogprobs(torch.autograd.Function):
    """Log-probabilities of existing logits, a few rows at a time; bitwise equal to `logprobs_of`.

    The logits are saved for the backward pass, which recomputes their softmax: that costs less than
    writing and reading it.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,  # noqa: FBT001  # autograd passes positional arguments
        at_once: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities, and entropies with `entropy`."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.at_once = temperature, at_once
        logprobs = logits.new_empty(len(targets), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else None
        for rows in _row_chunks(logits, at_once):
            of_rows = _log_softmax(logits[rows], temperature)
            logprobs[rows] = -F.nll_loss(
                of_rows, targets[rows], ignore_index=NO_TARGET, reduction="none"
            )
            if entropies is not None:
                entropies[rows] = -of_rows.exp().mul_(of_rows).sum(dim=-1)
            del of_rows  # free memory before the next chunk
        ctx.save_for_backward(logits, targets)
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        """The gradient of the logits."""
        if grad is None:
            return (None,) * 5
        logits, targets = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        chunks = _row_chunks(logits, ctx.at_once)
        most = max((rows.stop - rows.start for rows in chunks), default=0)
        zeros = logits.new_zeros(most, logits.shape[1], dtype=torch.float32)
        for rows in chunks:
            of_rows = _log_softmax(logits[rows], ctx.temperature)
            words = targets[rows, None]
            chosen = zeros[: len(words)].scatter_(1, words, grad[rows, None])
            if logits.dtype == torch.float32:
                here = of_logits[rows]
                _softmax_gradient.out(chosen, of_rows, -1, torch.float32, out=here)
            else:
                here = _softmax_gradient(chosen, of_rows, -1, torch.float32)
            if ctx.temperature != 1.0:
                here.div_(ctx.temperature)
            if logits.dtype != torch.float32:
                of_logits[rows] = here
            chosen.scatter_(1, words, 0.0)
            del of_rows, here  # free memory before the next chunk
        return of_logits, None, None, None, None


def _log_softmax(logits: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    logits = logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _row_chunks(logits: Float[Tensor, "K V"], at_once: int) -> list[slice]:
    """Equal chunks of at least two rows: PyTorch adds a single row in another order."""
    count, words = logits.shape
    chunks = max(1, min(math.ceil(count * words / at_once), count // 2))
    return [
        slice(count * chunk // chunks, count * (chunk + 1) // chunks) for chunk in range(chunks)
    ]
