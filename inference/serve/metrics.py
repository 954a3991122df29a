"""Figures for Prometheus, in a registry of their own.

Where a figure means what vLLM's does it has vLLM's name, so that dashboards fit.
"""

import time
from collections.abc import Mapping

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inference.engine.replay import PassCounts
from inference.engine.requests import Reason, Ticket
from inference.serve.jobs import Row

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """What the server counts; from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_model = {"labelnames": ["model_name"], "registry": self.registry}
        self._running = Gauge("vllm:num_requests_running", "Responses in a slot.", **of_model)
        self._waiting = Gauge("vllm:num_requests_waiting", "Prompts without a slot.", **of_model)
        self._slots = Gauge("rlhf:slots", "Sequences that can run at once.", **of_model)
        self._passes = Gauge(
            *("rlhf:decoding_passes", "Passes until now: by the model's modules, or replayed."),
            ["model_name", "by"],
            registry=self.registry,
        )
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", **of_model)
        self._queried = Counter(
            "vllm:prefix_cache_queries", "Tokens of prompts, by response.", **of_model
        )
        self._reused = Counter(
            "vllm:prefix_cache_hits", "Those whose keys and values were there.", **of_model
        )
        self._generated = Counter("vllm:generation_tokens", "Tokens of responses.", **of_model)
        self._first = Histogram(
            "vllm:time_to_first_token_seconds", "From a slot on.", buckets=SECONDS, **of_model
        )
        self._between = Histogram(
            "vllm:time_per_output_token_seconds", "Between tokens.", buckets=SECONDS, **of_model
        )
        self._ended = Counter(
            *("rlhf:responses", "Responses by why they ended.", ["model_name", "reason"]),
            registry=self.registry,
        )
        self._requests = Counter(
            *("rlhf:requests", "Requests by route and status.", ["route", "status"]),
            registry=self.registry,
        )
        self._seconds = Histogram(
            *("rlhf:request_seconds", "Time of a request.", ["route"]),
            buckets=SECONDS,
            registry=self.registry,
        )
        memory = Gauge("process_resident_memory_bytes", "Main memory.", registry=self.registry)
        memory.set_function(lambda: psutil.Process().memory_info().rss)

    def serves(self, model: str, slots: int) -> None:
        """Count a model's slots: it is served from now on."""
        self._slots.labels(model).set(slots)

    def running(self, rows: Mapping[str, int], waiting: Mapping[str, int]) -> None:
        """How many responses run and wait, by model."""
        for name, count in rows.items():
            self._running.labels(name).set(count)
        for name, count in waiting.items():
            self._waiting.labels(name).set(count)

    def passes(self, model: str, counts: PassCounts) -> None:
        """How decoding passes were computed until now; adapters are counted under their base."""
        self._passes.labels(model, "modules").set(counts.by_modules)
        self._passes.labels(model, "replay").set(counts.replayed)

    def token(self, row: Row, ticket: Ticket, now: float) -> None:
        """A response has one more token."""
        name = row.wanted.model
        self._generated.labels(name).inc()
        if row.newest:
            self._between.labels(name).observe(now - row.newest)
        else:
            self._prompt.labels(name).inc(len(row.wanted.prompt))
            self._queried.labels(name).inc(len(row.wanted.prompt))
            self._reused.labels(name).inc(ticket.num_reused)
            self._first.labels(name).observe(now - row.began)
        row.newest = now

    def ended(self, row: Row, reason: Reason) -> None:
        """A response has ended."""
        why = "stop" if reason == "cancelled" and row.stopped else reason
        self._ended.labels(row.wanted.model, why).inc()

    def request(self, route: str, status: int, began: float) -> None:
        """A request has ended."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(time.perf_counter() - began)

    @property
    def text(self) -> bytes:
        """All of them, in Prometheus's format."""
        return generate_latest(self.registry)
