"""Log-probabilities of given tokens and entropies at their positions, without all logits.

The logits of K tokens over a vocabulary of V are by far the largest tensor of a model, and softmax
and its gradient need three more of that size. Here only one tile exists at a time. There are two
kinds of backward pass:

- `RecomputeLogprobs`: the forward pass computes tiles of the vocabulary and saves each token's
  log-sum-exp; the backward pass recomputes the tiles, with four matrix products instead of
  three. A tile contains all tokens, so that its rows of the weight's gradient are final.
- `FusedGradLogprobs`: the forward pass computes tiles of tokens and their gradients, as if every
  log-probability had weight 1; the backward pass scales them. Nothing is computed twice. It is used
  where the output layer isn't trained, as with adapters, and where all tokens have the same
  weight, as in fine-tuning; if weights turn out to differ, a CPU recomputes the gradients.

`RowLogprobs` does the same for existing logits, a few rows at a time. Everything is plain
PyTorch and needs no compiler. Dimension names: K targets, d hidden size, V vocabulary; C targets or
W tokens per tile.
"""

import math
from collections.abc import Callable
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
"""Logits per tile of tokens, by device: 32 and 256 MiB of fp32. Smaller tiles add to the weight's
gradient more often; larger ones are not faster."""

VOCABULARY_TILE = {"cpu": 2**21, "cuda": TILE["cuda"]}
"""Logits per tile of the vocabulary: 8 MiB of fp32 stay in a CPU's last-level cache."""

MAX_UNTILED = 2**26
"""Maximum number of logits computed at once: 256 MiB of fp32."""

WEIGHT_TILE = 2**20
"""Number of weights that a CPU converts to fp32 at once: 4 MiB stay in its cache."""

ROW_CHUNK = {"cpu": 2**20, "cuda": TILE["cuda"]}
"""Number of logits computed at once, by device: 4 and 256 MiB of fp32."""


@dataclass(frozen=True)
class VocabularyShard:
    """The vocabulary rows of an embedding or output layer that this process holds."""

    first: int
    """Token id of the first row."""

    group: Group
    """The processes, each with an equal share of the rows."""


def compute_logprobs(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float,
    entropy: bool,
    entropy_grad: bool = True,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Compute log-probabilities of targets from logits / temperature, in nats and fp32.

    If `entropy_grad` is false, the entropy has no graph, which would be as large as the logits.
    """
    all_logprobs = _log_softmax(logits, temperature)
    logprobs = -F.nll_loss(all_logprobs, targets, ignore_index=NO_TARGET, reduction="none")
    if not entropy:
        return logprobs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
        return logprobs, -(all_logprobs.exp() * all_logprobs).sum(dim=-1)


def linear_logprobs(
    hidden: Float[Tensor, "K d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = True,
    uniform: bool = False,
    tile: int | None = None,
    vocab_shard: VocabularyShard | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Compute log-probabilities of targets under softmax(hidden @ weight.T + bias), and entropies.

    Hidden states have the dtype of the weights, or fp32 for logits that are not rounded to it. Set
    `entropy_grad` if the entropy is part of a loss, which takes more memory, and `uniform` if all
    log-probabilities have the same weight in the loss, which is faster. A tile has `tile` logits,
    by default `TILE` or `VOCABULARY_TILE`, or all of up to `MAX_UNTILED`. With `vocab_shard`, the
    range of a sharded weight, all processes of its group must call this.

    Results are in nats, fp32. Logits are those of `output_layer`, divided by the temperature. With
    one tile, the result is bitwise identical to that of `compute_logprobs`; with several tiles,
    sums are computed in a different order.
    """
    is_sharded = vocab_shard is not None and len(targets) > 0
    if not is_sharded and len(targets) * len(weight) <= (MAX_UNTILED if tile is None else tile):
        return compute_logprobs(
            output_layer(hidden, weight, bias),
            targets,
            temperature=temperature,
            entropy=entropy,
            entropy_grad=entropy_grad,
        )
    head_trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    use_fused = torch.is_grad_enabled() and not entropy and (uniform or not head_trains)
    if use_fused and not is_sharded:
        tile = tile or TILE.get(weight.device.type, TILE["cpu"])
        return FusedGradLogprobs.apply(hidden, weight, bias, targets, temperature, tile), None
    tile = tile or VOCABULARY_TILE.get(weight.device.type, VOCABULARY_TILE["cpu"])
    settings = (temperature, tile, entropy, vocab_shard if is_sharded else None)
    return RecomputeLogprobs.apply(hidden, weight, bias, targets, *settings)


def row_logprobs(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, " K"],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"] | None]:
    """Compute log-probabilities of targets under softmax(logits / temperature), and entropies.

    The logits may have any dtype and must not change until the backward pass. The entropy, None
    unless requested, is not differentiable. At most `chunk_size` logits (by default `ROW_CHUNK`),
    but at least two rows, are processed at once. Results are in nats, fp32.
    """
    chunk_size = chunk_size or ROW_CHUNK.get(logits.device.type, ROW_CHUNK["cpu"])
    return RowLogprobs.apply(logits, targets, temperature, entropy, chunk_size)


def output_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute logits in the dtype of the hidden states, which may be fp32 for 16-bit weights."""
    same_dtype = hidden.dtype == weight.dtype
    return F.linear(hidden, weight, bias) if same_dtype else fp32_linear(hidden, weight, bias)


@torch.library.custom_op("rlhf_pipeline::fp32_linear", mutates_args=())
def fp32_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute hidden @ weight.T + bias in fp32, for 16-bit weights and such hidden states.

    Rounding to bf16 changes a logit of 20 by up to 0.06 (MiniMax 2025, arXiv:2506.13585, section
    3.2). A GPU adds the products in fp32; a CPU converts `WEIGHT_TILE` weights at a time.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    if hidden.is_cuda:
        logits = torch.mm(rows.to(weight.dtype), weight.t(), out_dtype=torch.float32)
    else:
        logits, rows = rows.new_empty(len(rows), len(weight), dtype=torch.float32), rows.float()
        for tokens in _slices(len(weight), max(1, WEIGHT_TILE // weight.shape[1])):
            torch.mm(rows, weight[tokens].float().t(), out=logits[:, tokens])
    logits = logits if bias is None else logits.add_(bias)
    return logits.view(*hidden.shape[:-1], len(weight))


def _linear_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    """Compute the gradients of `fp32_linear` in the dtype of the weights, as for 16-bit logits."""
    (hidden, weight), needs_grad = ctx.saved_tensors, ctx.needs_input_grad
    grad, rows = (x.to(weight.dtype).flatten(0, -2) for x in (grad, hidden))
    return (
        (grad @ weight).view_as(hidden) if needs_grad[0] else None,
        grad.t() @ rows if needs_grad[1] else None,
        grad.sum(dim=0) if needs_grad[2] else None,
    )


def _save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ANN401, ARG001
    ctx.save_for_backward(*inputs[:2])


fp32_linear.register_autograd(_linear_gradients, setup_context=_save_inputs)


class RecomputeLogprobs(torch.autograd.Function):
    """Log-probabilities in tiles of the vocabulary, recomputed in the backward pass.

    With a sharded vocabulary, the target's logit, the largest logit and the sum of exponentials are
    combined over processes in the same way as over tiles, so no process computes all logits.
    Values of processes are added in a tree, in rank order.
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
        vocab_shard: VocabularyShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probabilities, and entropies if `entropy` is true."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.tile, ctx.vocab_shard = temperature, tile, vocab_shard
        local = targets if vocab_shard is None else targets - vocab_shard.first
        sums = _tile_sums(hidden, weight, bias, local, temperature, tile, entropy=entropy)
        if vocab_shard is not None:
            sums = _combine_sums(sums, vocab_shard.group)
        target_logits, max_logits, sum_exp, weighted_sum = sums
        entropies = sum_exp.log() - weighted_sum / sum_exp if entropy else None
        ctx.save_for_backward(hidden, weight, bias, local, max_logits, sum_exp, entropies)
        logprobs = (target_logits - max_logits - sum_exp.log()).squeeze(1)
        return logprobs, None if entropies is None else entropies.squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Compute the gradients of hidden states, weight and bias."""
        grad_logprobs, grad_entropy = (None if grad is None else grad[:, None] for grad in grads)
        hidden, weight, bias, targets, max_logits, sum_exp, entropies = ctx.saved_tensors
        grad_hidden, grad_weight, grad_bias = _tile_gradients(
            (hidden, weight, bias),
            targets,
            (max_logits, sum_exp),
            grad_logprobs,
            None if grad_entropy is None else (grad_entropy, entropies),
            needs_grad=ctx.needs_input_grad[:3],
            temperature=ctx.temperature,
            tile=ctx.tile,
        )
        if ctx.vocab_shard is not None and grad_hidden is not None:
            group, label = ctx.vocab_shard.group, "gradients of hidden states"
            grad_hidden = tree_sum(group.all_gather(grad_hidden, label=label))
        return grad_hidden, grad_weight, grad_bias, *[None] * 5


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
    """Compute statistics of the logits by tiles of the vocabulary, in fp32.

    With z the logits: z of each target, NaN if it is outside this vocabulary range; the largest z;
    the sum of exp(z - largest); and the sum of (z - largest) exp(z - largest) if `entropy`, else 0.
    """
    target_logits = hidden.new_full((len(targets), 1), float("nan"), dtype=torch.float32)
    # Not -inf: for a tile of -inf, the difference would be NaN.
    max_logits = torch.full_like(target_logits, torch.finfo(torch.float32).min)
    sum_exp, weighted_sum = torch.zeros_like(target_logits), torch.zeros_like(target_logits)
    for tokens in _vocabulary_tiles(weight, len(targets), tile):
        logits = _logits(hidden, weight, bias, tokens, temperature)
        in_tile, indices = _targets_in(targets, tokens)
        target_logits = torch.where(in_tile, logits.gather(1, indices), target_logits)
        previous = max_logits
        max_logits = torch.maximum(previous, logits.amax(dim=1, keepdim=True))
        rescale = (previous - max_logits).exp()
        if entropy:
            shifted_sum = torch.where(sum_exp > 0, sum_exp * (previous - max_logits), sum_exp)
            weighted_sum = (weighted_sum + shifted_sum) * rescale
        exponentials = logits.sub_(max_logits).exp() if entropy else logits.sub_(max_logits).exp_()
        sum_exp = sum_exp * rescale + exponentials.sum(dim=1, keepdim=True)
        if entropy:
            weighted_sum = weighted_sum + exponentials.mul_(logits).sum(dim=1, keepdim=True)
        del logits, exponentials  # free memory before the next tile
    return torch.stack([target_logits, max_logits, sum_exp, weighted_sum])


def _combine_sums(local: Float[Tensor, "4 K 1"], group: Group) -> Float[Tensor, "4 K 1"]:
    """Combine the statistics of the vocabulary ranges of all processes."""
    gathered = torch.stack(group.all_gather(local, label="sums of logits"))
    target_logits, max_logits, sum_exp, weighted_sum = gathered.unbind(dim=1)
    has_target = ~target_logits.isnan()
    target_logit = torch.where(has_target, target_logits, 0.0).sum(dim=0)
    global_max = max_logits.amax(dim=0)
    rescale = (max_logits - global_max).exp()
    shifted_sum = weighted_sum + sum_exp * (max_logits - global_max)
    return torch.stack(
        [
            torch.where(has_target.any(dim=0), target_logit, float("nan")),
            global_max,
            tree_sum(list(sum_exp * rescale)),
            tree_sum(list(shifted_sum * rescale)),
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
        """Compute log-probabilities."""
        ctx.temperature, ctx.tile = temperature, tile
        logprobs = hidden.new_empty(len(targets), 1, dtype=torch.float32)
        max_logits, sum_exp = torch.empty_like(logprobs), torch.empty_like(logprobs)

        def compute_tile(rows: slice, logits: Tensor) -> Tensor:
            row_targets = targets[rows, None]
            logits = logits if temperature == 1.0 else logits.div_(temperature)
            max_logits[rows] = logits.amax(dim=1, keepdim=True)
            grad = logits.sub_(max_logits[rows])
            target_logits = grad.gather(1, row_targets)
            sum_exp[rows] = grad.exp_().sum(dim=1, keepdim=True)
            logprobs[rows] = target_logits - sum_exp[rows].log()
            grad.mul_(-1 / (sum_exp[rows] * temperature))
            change = torch.full_like(target_logits, 1 / temperature)
            return grad.scatter_add_(1, row_targets, change)

        ctx.save_for_backward(hidden, weight, bias, targets, max_logits, sum_exp)
        # save_for_backward takes only inputs and outputs.
        ctx.precomputed = _fused_gradients((hidden, weight, bias), compute_tile, tile, ctx)
        return logprobs.squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        """Compute the gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, max_logits, sum_exp = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        head_trains = needs_grad[1] or needs_grad[2]
        is_uniform = not head_trains or _is_uniform(grad)
        if ctx.precomputed is None or not is_uniform:
            return *_tile_gradients(
                (hidden, weight, bias),
                targets,
                (max_logits, sum_exp),
                grad[:, None],
                None,
                needs_grad=needs_grad[:3],
                temperature=ctx.temperature,
                tile=ctx.tile,
            ), *[None] * 3
        grad_hidden, grad_weight, grad_bias = ctx.precomputed
        ctx.precomputed = None  # scaled in place, once
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(grad[:, None])
        grad_weight, grad_bias = (
            None if part is None else part.mul_(grad[0]).to(weight.dtype)
            for part in (grad_weight, grad_bias)
        )
        return grad_hidden, grad_weight, grad_bias, *[None] * 3


def _fused_gradients(
    inputs: tuple[Tensor, Tensor | None, Tensor | None],
    compute_tile: Callable[[slice, Tensor], Tensor],
    tile: int,
    ctx: Any,  # noqa: ANN401
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias; None for those `ctx` doesn't need.

    Without a weight, the hidden states are logits. `compute_tile` gets a slice of the rows and a
    copy of their logits in fp32; it returns the gradients of those, or of only the first columns.
    """
    hidden, weight, bias = inputs
    dtype = hidden.dtype if weight is None else weight.dtype
    vocab, low = hidden.shape[1] if weight is None else len(weight), hidden.to(dtype)
    grad_hidden = torch.zeros_like(low) if ctx.needs_input_grad[0] else None
    grad_weight, grad_bias = (
        torch.zeros_like(param, dtype=torch.float32) if param is not None and needed else None
        for param, needed in zip(inputs[1:], ctx.needs_input_grad[1:3], strict=True)
    )
    for rows in _slices(len(hidden), max(1, tile // vocab)):
        if weight is None:
            logits = hidden[rows].to(torch.float32, copy=True)
        else:
            logits = _logits(hidden[rows], weight, bias, slice(None), 1.0)
        grad = compute_tile(rows, logits).to(dtype)
        tokens = slice(grad.shape[1])
        if grad_hidden is not None:
            if weight is None:
                grad_hidden[rows, tokens] = grad
            else:
                torch.mm(grad, weight[tokens], out=grad_hidden[rows])
        if grad_weight is not None:
            _add_product(grad_weight[tokens], grad.t(), low[rows])
        if grad_bias is not None:
            grad_bias[tokens] += grad.sum(dim=0, dtype=torch.float32)
        del logits, grad
    return grad_hidden, grad_weight, grad_bias


class TiledLoss(torch.autograd.Function):
    """A loss summed over targets; the forward pass also computes its gradients, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        compute_tile: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
        tile: int | None = None,
    ) -> Tensor:
        """Return the sum of the losses; `compute_tile` returns the losses of a slice of the rows.

        It also returns gradients, as in `_fused_gradients`. `tile` is the maximum number of logits
        that `compute_tile` gets; by default, it may use eight tensors of this size.
        """
        total = hidden.new_zeros((), dtype=torch.float32)

        def add_losses(rows: slice, logits: Tensor) -> Tensor:
            losses, grad = compute_tile(rows, logits)
            total.add_(losses.sum())
            return grad

        tile = tile or TILE.get(hidden.device.type, TILE["cpu"]) // 2
        ctx.gradients = _fused_gradients((hidden, weight, bias), add_losses, tile, ctx)
        ctx.dtype = hidden.dtype if weight is None else weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        """Return the stored gradients, multiplied by `grad`."""
        stored, ctx.gradients = ctx.gradients, None  # scaled in place, once
        return *(None if x is None else x.mul_(grad).to(ctx.dtype) for x in stored), None, None


def _is_uniform(grad: Float[Tensor, " K"]) -> bool:
    """Return whether all values are equal; on a GPU, return True and fail later if they aren't."""
    first = grad[:1]
    if not grad.is_cuda:
        return torch.equal(grad, first.expand_as(grad))
    is_uniform = (grad == first) | (grad.isnan() & first.isnan())
    message = "gradients differ between tokens in a pass declared `uniform`"
    torch.ops.aten._assert_async.msg(is_uniform.all(), message)  # noqa: SLF001
    return True


def _tile_gradients(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    targets: Int[Tensor, " K"],
    sums: tuple[Float[Tensor, "K 1"], Float[Tensor, "K 1"]],
    grad_logprobs: Float[Tensor, "K 1"] | None,
    grad_entropy: tuple[Float[Tensor, "K 1"], Float[Tensor, "K 1"]] | None,
    *,
    needs_grad: tuple[bool, ...],
    temperature: float,
    tile: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the required gradients of hidden states, weight and bias.

    With z the logits, p = softmax(z), H the entropy, t the target, and g and h the gradients of
    log p_t and of H:  dz = g * (1[t] - p) - h * p * (log p + H).

    Inputs are hidden states, weight and bias. `sums` are the largest logit z_max of each target and
    the sum of exp(z - z_max); `grad_logprobs` is g, and `grad_entropy` h and H, or None for zeros.
    """
    hidden, weight, bias = inputs
    low = hidden.to(weight.dtype)
    max_logits, sum_exp = sums
    grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_grad[0] else None
    grad_weight = torch.empty_like(weight) if needs_grad[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs_grad[2] else None
    for tokens in _vocabulary_tiles(weight, len(targets), tile):
        shifted = _logits(hidden, weight, bias, tokens, temperature).sub_(max_logits)
        grad = shifted.exp_() if grad_entropy is None else shifted.exp()
        if grad_entropy is None:
            grad.mul_(0.0 if grad_logprobs is None else -grad_logprobs / (sum_exp * temperature))
        else:
            factor = shifted.add_(grad_entropy[1] - sum_exp.log()).mul_(grad_entropy[0])
            if grad_logprobs is not None:
                factor.add_(grad_logprobs)
            grad.mul_(factor.div_(-sum_exp * temperature))
            del factor
        del shifted
        if grad_logprobs is not None:
            in_tile, indices = _targets_in(targets, tokens)
            grad.scatter_add_(1, indices, torch.where(in_tile, grad_logprobs / temperature, 0.0))
        grad = grad.to(weight.dtype)
        if grad_hidden is not None:
            _add_product(grad_hidden, grad, weight[tokens])
        if grad_weight is not None:
            torch.mm(grad.t(), low, out=grad_weight[tokens])
        if grad_bias is not None:
            grad_bias[tokens] = grad.sum(dim=0)
        del grad
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _vocabulary_tiles(weight: Float[Tensor, "V d"], count: int, tile: int) -> list[slice]:
    return _slices(len(weight), max(1, tile // count))


def _logits(
    hidden: Float[Tensor, "C d"],
    weight: Float[Tensor, "V d"],
    bias: Float[Tensor, " V"] | None,
    tokens: slice,
    temperature: float,
) -> Float[Tensor, "C W"]:
    """Compute logits as a new tensor in fp32."""
    logits = output_layer(hidden, weight[tokens], None if bias is None else bias[tokens]).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _targets_in(targets: Int[Tensor, " K"], tokens: slice) -> tuple[Tensor, Tensor]:
    """Return a mask (K, 1) of targets in this vocabulary range, and their indices in it, or 0."""
    in_tile = ((targets >= tokens.start) & (targets < tokens.stop))[:, None]
    return in_tile, torch.where(in_tile, targets[:, None] - tokens.start, 0)


def _add_product(
    total: Float[Tensor, "A B"], left: Float[Tensor, "A C"], right: Float[Tensor, "C B"]
) -> None:
    """Add left @ right to an fp32 sum."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


class RowLogprobs(torch.autograd.Function):
    """`compute_logprobs` of existing logits, a few rows at a time, with bit-identical results.

    The logits are saved for the backward pass, which recomputes their softmax: this costs less than
    writing and reading it.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,  # noqa: FBT001  # autograd passes positional arguments
        chunk_size: int,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute log-probabilities, and entropies if `entropy` is true."""
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        logprobs = logits.new_empty(len(targets), dtype=torch.float32)
        entropies = torch.empty_like(logprobs) if entropy else None
        for rows in _row_chunks(logits, chunk_size):
            logprob_rows = _log_softmax(logits[rows], temperature)
            logprobs[rows] = -F.nll_loss(
                logprob_rows, targets[rows], ignore_index=NO_TARGET, reduction="none"
            )
            if entropies is not None:
                entropies[rows] = -logprob_rows.exp().mul_(logprob_rows).sum(dim=-1)
            del logprob_rows  # free memory before the next chunk
        ctx.save_for_backward(logits, targets)
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyrefly: ignore[bad-override]
        """Compute the gradient of the logits."""
        if grad is None:
            return (None,) * 5
        logits, targets = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        chunks = _row_chunks(logits, ctx.chunk_size)
        max_rows = max((rows.stop - rows.start for rows in chunks), default=0)
        zeros = logits.new_zeros(max_rows, logits.shape[1], dtype=torch.float32)
        for rows in chunks:
            logprob_rows = _log_softmax(logits[rows], ctx.temperature)
            row_targets = targets[rows, None]
            scattered = zeros[: len(row_targets)].scatter_(1, row_targets, grad[rows, None])
            if logits.dtype == torch.float32:
                grad_rows = grad_logits[rows]
                _softmax_gradient.out(scattered, logprob_rows, -1, torch.float32, out=grad_rows)
            else:
                grad_rows = _softmax_gradient(scattered, logprob_rows, -1, torch.float32)
            if ctx.temperature != 1.0:
                grad_rows.div_(ctx.temperature)
            if logits.dtype != torch.float32:
                grad_logits[rows] = grad_rows
            scattered.scatter_(1, row_targets, 0.0)
            del logprob_rows, grad_rows  # free memory before the next chunk
        return grad_logits, None, None, None, None


def _log_softmax(logits: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    logits = logits.float()
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _row_chunks(logits: Float[Tensor, "K V"], chunk_size: int) -> list[slice]:
    """Split rows into chunks of two or more: PyTorch sums single rows in a different order."""
    count, vocabulary = logits.shape
    chunks = max(1, min(math.ceil(count * vocabulary / chunk_size), count // 2))
    return [
        slice(count * chunk // chunks, count * (chunk + 1) // chunks) for chunk in range(chunks)
    ]
