"""Distillation from stored teacher distributions: tokens and loss."""

import torch
from jaxtyping import Float
from torch import Tensor

from inference.text import plain_text
from pipeline.data.batches import TokenBatch
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.teacher import TeacherTokens
from pipeline.kernels.logprobs import TiledLoss
from pipeline.system.errors import DataError


def encode_distilled(row: Example, teacher: TeacherTokens, chat: ChatFormat) -> Encoded:
    """Return the prompt's tokens, followed by the teacher's tokens, which are trained on.

    Raises:
        DataError: the teacher's tokenizer or end-of-turn token differs from the student's.
    """
    ids, tokenizer = teacher.ids.tolist(), chat.tokenizer
    text, decoded = row.chosen[0].content.strip(), plain_text(tokenizer, ids).strip()
    if max(*ids, teacher.top_ids.max()) >= len(tokenizer) or not decoded.startswith(text):
        raise DataError(
            f"{row.origin}: token ids have another meaning for the student, or none; use a teacher"
            " with the student's tokenizer, lower --top-logprobs if unused ids are among the top"
            " tokens, or set sft.distill_weight to 0"
        )
    if teacher.ended and ids[-1] not in chat.stop_ids:
        raise DataError(
            f"{row.origin}: the response ends with token {ids[-1]}, which doesn't end a turn in"
            f" {chat.title}; set --format to the teacher's chat template"
        )
    prompt = chat.encode_prompt(row.prompt, origin=row.origin)
    trained = [False] * len(prompt) + [True] * len(ids)
    return Encoded(prompt + ids, trained, teacher)


def distillation_loss(
    *layer: Tensor | None, batch: TokenBatch, weight: float, tile: int | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the summed loss, (1 - weight) * negative log-likelihood + weight * KL, and the KL.

    KL(teacher || student) (Hinton et al. 2015, arXiv:1503.02531, at temperature 1) is computed over
    the teacher's most likely tokens and one bucket for all others, which bounds the full KL from
    below. Its gradient with respect to the logits is p - t: the student's distribution p minus the
    teacher's, which divides the bucket's probability among its tokens in proportion to p.

    Args:
        layer: hidden states, weight and bias of the output layer; or logits.
        batch: a micro-batch with the teacher's distributions.
        weight: weight of the KL.
        tile: maximum number of logits computed at once; by default, that of `TiledLoss`.
    """
    assert batch.teacher is not None
    top_ids, top_logprobs = batch.teacher
    targets, total_kl = batch.input_ids[batch.targets, None], top_logprobs.new_zeros(())

    def compute_tile(part: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_q, q = top_ids[part], top_logprobs[part], top_logprobs[part].exp()
        log_p = logits.sub_(logits.logsumexp(dim=1, keepdim=True))  # in place, to save memory
        nll = -log_p.gather(1, targets[part])
        kl = (q * (log_q - log_p.gather(1, ids))).sum(dim=1, keepdim=True)
        t = log_p.scatter(1, ids, -torch.inf)
        rest_log_p = t.logsumexp(dim=1, keepdim=True)
        rest_q = (1 - q.sum(dim=1, keepdim=True)).clamp(min=0) * rest_log_p.isfinite()
        rest_log_p = torch.where(rest_q > 0, rest_log_p, 0.0)
        kl += torch.xlogy(rest_q, rest_q) - rest_q * rest_log_p
        total_kl.add_(kl.sum())
        t.sub_(rest_log_p).exp_().mul_(weight * rest_q).scatter_(1, ids, weight * q)
        t.scatter_add_(1, targets[part], torch.full_like(nll, 1 - weight))
        return (1 - weight) * nll + weight * kl, log_p.exp_().sub_(t)

    hidden, matrix, bias = (*layer, None, None)[:3]
    return TiledLoss.apply(hidden, matrix, bias, compute_tile, tile), total_kl
