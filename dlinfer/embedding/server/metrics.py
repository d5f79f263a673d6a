"""The server's counters, in Prometheus's format."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "dlinfer:embedding_requests",
            "Requests by path and HTTP status; 499 is a client that has gone.",
            ("path", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "dlinfer:embedding_request_seconds",
            "Time from the request to its answer.",
            ("path",),
            registry=registry,
        )
        self._tokens = Histogram(
            "dlinfer:embedding_batch_tokens", "Tokens of a forward.", buckets=_TOKENS, registry=registry
        )
        self._rows = Histogram(
            "dlinfer:embedding_batch_texts",
            "Texts or pairs of a forward.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
            registry=registry,
        )
        self._forwards = Counter(
            "dlinfer:embedding_forward_seconds", "Time in forwards, in seconds.", registry=registry
        )
        self._waiting = Gauge("dlinfer:embedding_queue_tokens", "Tokens that wait.", registry=registry)

    def watch(self, waiting: Callable[[], int]) -> None:
        """Count what ``waiting`` returns as the tokens that wait."""
        self._waiting.set_function(waiting)

    def forward(self, tokens: int, rows: int, seconds: float) -> None:
        """Count a forward."""
        self._tokens.observe(tokens)
        self._rows.observe(rows)
        self._forwards.inc(seconds)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """Return all counters as text."""
        return generate_latest(self._registry)
