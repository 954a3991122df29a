"""Prometheus metrics, with vLLM's names where the meaning is the same."""

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Metrics:
    """Counters, gauges and histograms of a server; thread-safe."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        by_model = {"labelnames": ["model_name"], "registry": registry}
        self.running = Gauge("vllm:num_requests_running", "Responses being generated.", **by_model)
        self.waiting = Gauge("vllm:num_requests_waiting", "Prompts waiting for a slot.", **by_model)
        self.slots = Gauge("rlhf:slots", "Sequences that can run at once.", **by_model)
        self.passes = Gauge(
            *("rlhf:decoding_passes", "Decoding passes so far, by method."),
            ["model_name", "by"],
            registry=registry,
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", **by_model)
        self.queried = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", **by_model
        )
        self.reused = Counter(
            "vllm:prefix_cache_hits", "Prompt tokens with reused keys and values.", **by_model
        )
        self.generated_tokens = Counter("vllm:generation_tokens", "Response tokens.", **by_model)
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From slot to token.", buckets=SECONDS, **by_model
        )
        self.time_between_tokens = Histogram(
            "vllm:time_per_output_token_seconds", "Time per token.", buckets=SECONDS, **by_model
        )
        self.ended = Counter(
            *("rlhf:responses", "Finished responses by reason.", ["model_name", "reason"]),
            registry=registry,
        )
        self.requests = Counter(
            *("rlhf:requests", "Requests by route and status.", ["route", "status"]),
            registry=registry,
        )
        self.request_seconds = Histogram(
            *("rlhf:request_seconds", "Duration of a request.", ["route"]),
            buckets=SECONDS,
            registry=registry,
        )
        memory = Gauge("process_resident_memory_bytes", "Resident memory.", registry=registry)
        memory.set_function(lambda: psutil.Process().memory_info().rss)

    @property
    def text(self) -> bytes:
        """All metrics in Prometheus's format."""
        return generate_latest(self._registry)
