"""What /metrics says. Names follow vLLM's where it has one, under the prefix `lumotree:`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from lumotree.request import Generation

if TYPE_CHECKING:
    from lumotree.decoder import Run
    from lumotree.serve.scheduler import Job

PREFIX = "lumotree:"
LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
# When a counter was made is of no use here and doubles the page.
disable_created_metrics()
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of one server, in a registry of its own.

    The four of the protocol: generated tokens, draft tokens, accepted draft tokens, and
    verification steps. All only rise; a reader takes differences.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=LATENCY_S, registry=self.registry)

        self.generated = counter("generation_tokens", "Tokens emitted.")
        self.prompt = counter("prompt_tokens", "Prompt tokens of requests that began.")
        self.steps = counter("spec_decode_num_drafts", "Verification steps.")
        self.drafted = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.by_depth = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Steps whose accepted path reached this draft depth (from 0): survival by depth.",
            ("position",),
        )
        self.phase_s = counter(
            "phase_seconds", "Decode time by phase, a round once per request in it.", ("phase",)
        )
        self.success = counter("request_success", "Requests served.", ("finished_reason",))
        self.failures = counter("request_failure", "Requests ended early, by status.", ("status",))
        self.refusals = counter("request_refused", "Requests not taken, by reason.", ("reason",))
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token, if served.")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token, if served.")
        self.prefix_reused = counter("prefix_cache_hit_tokens", "Prompt tokens not computed again.")
        self.prefix_hits = counter("prefix_cache_hits", "Prompts that began with a known prefix.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompts looked up.")

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A figure that is read when somebody asks."""
        Gauge(PREFIX + name, text, registry=self.registry).set_function(read)

    def refused(self, reason: str) -> None:
        self.refusals.labels(reason).inc()

    def failed(self, status: int) -> None:
        """499: the client went away; 503: the server stopped; 504: out of time."""
        self.failures.labels(str(status)).inc()

    def first_token(self, job: Job, run: Run) -> None:
        self.prompt.inc(run.prompt_tokens)
        self.prefix_queries.inc()
        self.prefix_reused.inc(run.reused)
        self.prefix_hits.inc(run.reused > 0)

    def step(self, job: Job, run: Run) -> None:
        """What `run` has done since the last call for this job."""
        self._rise(job, "generated", self.generated, run.completion_tokens)
        self._rise(job, "steps", self.steps, run.steps)
        self._rise(job, "drafted", self.drafted, run.drafted)
        self._rise(job, "accepted", self.accepted, sum(run.accepted_by_depth))
        for depth, count in enumerate(run.accepted_by_depth):
            self._rise(job, f"depth {depth}", self.by_depth.labels(str(depth)), count)

    @staticmethod
    def _rise(job: Job, key: str, counter: Any, now: int) -> None:
        before = job.counted.get(key, 0)
        if now > before:
            counter.inc(now - before)
            job.counted[key] = now

    def phases(self, run: Run) -> None:
        """Once, at the end of a request."""
        for phase, ms in run.phases_ms.items():
            self.phase_s.labels(phase).inc(ms / 1e3)

    def finished(self, job: Job, generation: Generation) -> None:
        self.success.labels(generation.finish_reason).inc()
        self.e2e.observe(time.monotonic() - job.arrived)
        self.ttft.observe(job.first_at - job.arrived)

    def text(self) -> bytes:
        return generate_latest(self.registry)
