"""Metrics for Prometheus, with vLLM's names where the meaning is the same."""

from collections.abc import Mapping

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from inference.engine.replay import PassCounts
from inference.engine.requests import Reason, Ticket

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Counters, gauges and histograms of a server; thread-safe."""

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
        """Set the number of a model's slots."""
        self._slots.labels(model).set(slots)

    def running(self, rows: Mapping[str, int], waiting: Mapping[str, int]) -> None:
        """Set the numbers of running responses and waiting prompts, by model."""
        for name, count in rows.items():
            self._running.labels(name).set(count)
        for name, count in waiting.items():
            self._waiting.labels(name).set(count)

    def passes(self, model: str, counts: PassCounts) -> None:
        """Set the numbers of decoding passes by how they were computed."""
        self._passes.labels(model, "modules").set(counts.by_modules)
        self._passes.labels(model, "replay").set(counts.replayed)

    def token(self, model: str, ticket: Ticket, *, seconds: float, is_first: bool) -> None:
        """Count a token, which came that long after the last one or its request's submission."""
        self._generated.labels(model).inc()
        if is_first:
            self._prompt.labels(model).inc(len(ticket.request.prompt))
            self._queried.labels(model).inc(len(ticket.request.prompt))
            self._reused.labels(model).inc(ticket.num_reused)
            self._first.labels(model).observe(seconds)
        else:
            self._between.labels(model).observe(seconds)

    def ended(self, model: str, reason: Reason) -> None:
        """Count a response that ended."""
        self._ended.labels(model, reason).inc()

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    @property
    def text(self) -> bytes:
        """All metrics in Prometheus's format."""
        return generate_latest(self.registry)
