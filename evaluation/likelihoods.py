"""A model as harnesses ask it: log-likelihoods of texts, and text that goes on until a string."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inference.responses import Responder
from inference.settings import Sampling
from pipeline.data.batches import TokenBatch
from pipeline.models.forward import Policy, context_length
from pipeline.models.load import load_for_inference
from pipeline.parallel.device import local_device

MAX_NEW_TOKENS = 256
"""Longest response, in tokens, to a request of the harness that sets none."""


class TextModel:
    """A causal language model that reads texts as they are, without a chat format.

    Tokens are cut as EleutherAI's harness cuts them (Gao et al. 2024, zenodo.12608602), so that
    figures compare: spaces at the end of a context belong to what follows it, and an empty context
    is the tokenizer's beginning, or else end, of sequence.

    Raises:
        ModelError: there is no model at `path`.
    """

    def __init__(self, path: str, *, batch_size: int = 8) -> None:
        self.model, self.tokenizer = load_for_inference(path)
        self.policy = Policy(self.model)
        self.batch_size = batch_size
        self.limit = context_length(self.model)
        begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        first = end if begin is None else begin
        assert isinstance(first, int)
        self.first = first
        """Stands where there is no context."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with the tokens that the tokenizer begins a text with."""
        begins = self.tokenizer.bos_token
        special = special and not (begins and text.startswith(str(begins)))
        return list(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log P(continuation | context) in nats of each pair, and whether it is the greedy one."""
        return self._scored([self._encode_pair(*pair) for pair in pairs])

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        """Log P of each whole text in nats, every token once.

        A text that is longer than the model reads is cut into windows, each as long as can be; of
        the last one the model reads as much of what comes before.
        """
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            ids = self.encode(text)
            for start in range(0, len(ids), self.limit):
                end = min(start + self.limit, len(ids))
                before = ids[max(0, end - self.limit - 1) : start] if start else [self.first]
                windows.append((before, ids[start:end]))
                owners.append(number)
        sums = [0.0] * len(texts)
        for owner, (logprob, _) in zip(owners, self._scored(windows), strict=True):
            sums[owner] += logprob
        return sums

    def continuations(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The text that follows each context, by the settings beside it.

        `until` names texts before which it ends, `max_gen_toks` its longest length; `temperature`,
        `top_p` and `top_k` count with `do_sample` alone, else the likeliest tokens follow.
        """
        texts = [""] * len(requests)
        for number, (context, settings) in enumerate(requests):
            sampling = _sampling(settings)
            until = settings.get("until") or []
            stops = [until] if isinstance(until, str) else [each for each in until if each]
            responder = Responder(
                self.model, self.tokenizer, sampling, raw=True, stop_strings=stops
            )
            # The end of a context that leaves no room is what counts.
            room = max(1, self.limit - sampling.max_new_tokens)
            prompt = (self.encode(context) or [self.first])[-room:]
            (responses,) = responder.responses([prompt], first_row=number, batch_size=1)
            texts[number] = responses[0].text
        return texts

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            ids = self.encode(continuation, special=False)
            return ([self.first], ids) if ids[:1] != [self.first] else (ids[:1], ids[1:])
        bare = context.rstrip()
        whole = self.encode(context + continuation)
        before = self.encode(bare) or [self.first]
        return before, whole[len(before) :]

    @torch.no_grad()
    def _scored(self, parts: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows: list[tuple[float, bool]] = [(0.0, True)] * len(parts)
        # Similar lengths side by side, the longest first: what has no room fails first.
        order = sorted(
            (number for number, (_, after) in enumerate(parts) if after),
            key=lambda number: -len(parts[number][0]) - len(parts[number][1]),
        )
        for first in range(0, len(order), self.batch_size):
            numbers = order[first : first + self.batch_size]
            batch, ids, counts = _laid_out([parts[number] for number in numbers], self.limit)
            logprobs, likeliest = self.policy.likeliest(
                batch.to(local_device()), ids.to(local_device())
            )
            for number, of_row, best in zip(
                numbers, logprobs.split(counts), likeliest.split(counts), strict=True
            ):
                rows[number] = of_row.double().sum().item(), bool(best.all())
        return rows


def _laid_out(
    parts: Sequence[tuple[list[int], list[int]]], limit: int
) -> tuple[TokenBatch, Tensor, list[int]]:
    """What the model reads of contexts and continuations, the tokens to score, and how many each.

    The last token of a continuation is scored and not read; of what is too long the end is read.
    """
    inputs: list[int] = []
    lengths: list[int] = []
    places: list[int] = []
    ids: list[int] = []
    counts: list[int] = []
    for before, after in parts:
        whole = (before + after)[-limit - 1 :]
        scored = whole[-min(len(after), len(whole) - 1) :]
        inputs += whole[:-1]
        lengths.append(len(whole) - 1)
        places += range(len(inputs) - len(scored) + 1, len(inputs) + 1)
        ids += scored
        counts.append(len(scored))
    batch = TokenBatch(torch.tensor(inputs), tuple(lengths), torch.tensor(places))
    return batch, torch.tensor(ids), counts


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    samples = bool(settings.get("do_sample")) and float(settings.get("temperature", 1.0)) > 0
    longest = settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS
    if not samples:
        return Sampling(max_new_tokens=int(longest), temperature=0.0)
    return Sampling(
        max_new_tokens=int(longest),
        temperature=float(settings.get("temperature", 1.0)),
        top_p=float(settings.get("top_p", 1.0)),
        top_k=int(settings["top_k"]) if settings.get("top_k") else None,
    )
