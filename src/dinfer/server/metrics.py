"""Figures for Prometheus, in a registry of each app's own."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dinfer.engine.async_llm import AsyncLLM
from dinfer.request import Output, Request

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)


class Metrics:
    """What is counted, and where it is read."""

    def __init__(self, models: Mapping[str, AsyncLLM]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_Engines(models))
        by_call = ["endpoint", "status"]
        self.calls = Counter("dinfer_calls", "HTTP calls.", by_call, registry=registry)
        self.requests = Counter(
            "dinfer_requests", "Finished requests.", ["model", "reason"], registry=registry
        )
        self.tokens = Counter(
            "dinfer_tokens", "Tokens of finished requests.", ["model", "kind"], registry=registry
        )
        self.rows = Counter(
            "dinfer_rows",
            "Rows of finished requests: run, or saved by their cache (its hits).",
            ["model", "kind"],
            registry=registry,
        )
        self.per_forward = _histogram(registry, "tokens_per_forward", "Of a request.", _TOKENS)
        self.seconds = _histogram(registry, "request_seconds", "Arrival to end.", _SECONDS)
        self.first = _histogram(
            registry, "first_settled_seconds", "Arrival to the first settled text.", _SECONDS
        )

    def finished(self, model: str, request: Request, output: Output) -> None:
        """Counts an answer."""
        stats = output.stats
        self.requests.labels(model, output.finish_reason).inc()
        self.tokens.labels(model, "prompt").inc(output.usage.prompt_tokens)
        self.tokens.labels(model, "answer").inc(output.usage.completion_tokens)
        self.rows.labels(model, "run").inc(stats.rows_run)
        whole = len(request.canvas) * stats.forward_passes
        self.rows.labels(model, "saved").inc(max(0, whole - stats.rows_run))
        self.per_forward.labels(model).observe(stats.tokens_per_forward)
        self.seconds.labels(model).observe(stats.seconds + stats.queued_seconds)

    def text(self) -> bytes:
        """All figures in Prometheus' text form."""
        return generate_latest(self.registry)


def _histogram(
    registry: CollectorRegistry, name: str, what: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(f"dinfer_{name}", what, ["model"], registry=registry, buckets=buckets)


class _Engines(Collector):
    """What the engines hold at the moment they are asked."""

    def __init__(self, models: Mapping[str, AsyncLLM]) -> None:
        self._models = models

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One gauge a figure, one sample a model."""
        gauges = {
            "dinfer_waiting_requests": "Requests that wait for a place or pages.",
            "dinfer_active_requests": "Requests that take part in steps.",
            "dinfer_active_rows": "Positions of those requests' canvases.",
            "dinfer_pages_used": "Pages of keys and values in use.",
            "dinfer_pages": "Pages of keys and values in all.",
        }
        families = {
            name: GaugeMetricFamily(name, what, None, ["model"]) for name, what in gauges.items()
        }
        for model, llm in self._models.items():
            scheduler, pool = llm.engine.scheduler, llm.engine.pool
            running = list(scheduler.running)
            figures = (
                len(scheduler.waiting),
                len(running),
                sum(len(sequence.canvas) for sequence in running),
                pool.pages - pool.free,
                pool.pages,
            )
            for family, figure in zip(families.values(), figures, strict=True):
                family.add_metric([model], figure)
        return families.values()
