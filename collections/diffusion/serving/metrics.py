"""Counters of a server, in Prometheus' format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "nemo_dllm"

# Finished by an end token or text, or at its length; given up because the client left, because time was up, because the
# model failed, or because the server stopped.
ROW_ENDS = ("stop", "length", "cancelled", "timeout", "failed", "shutting_down", "device_failed")

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of = {"namespace": PREFIX, "registry": self._registry}
        self.requests = Counter("requests", "Requests by path and HTTP status.", ["path", "status"], **of)
        self.rows = Counter("rows", "Choices by how they ended.", ["finish_reason"], **of)
        for reason in ROW_ENDS:
            self.rows.labels(reason)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **of)
        self.completion_tokens = Counter("completion_tokens", "Tokens of finished completions.", **of)
        self.passes = Counter("forward_passes", "Denoising steps.", **of)
        self.batch_rows = Histogram("batch_rows", "Rows per denoising step.", buckets=_ROWS, **of)
        self.first_text_seconds = Histogram(
            "first_text_seconds", "From a request's arrival to its first text.", buckets=_SECONDS, **of
        )
        self.request_seconds = Histogram(
            "request_seconds", "From a request's arrival to its last token.", buckets=_SECONDS, **of
        )

    def watch(self, name: str, help_text: str, read: Callable[[], int]) -> None:
        """Add a gauge that is read when somebody asks."""
        Gauge(name, help_text, namespace=PREFIX, registry=self._registry).set_function(read)

    def text(self) -> bytes:
        """All of them, as ``/metrics`` gives them."""
        return generate_latest(self._registry)
