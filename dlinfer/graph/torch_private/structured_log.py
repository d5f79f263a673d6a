"""Artefacts in torch's structured log, which TORCH_TRACE writes and tlparse shows."""

from collections.abc import Callable

from torch._logging import trace_structured  # pyright: ignore[reportPrivateImportUsage]


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text under a name. ``text`` is called only while the log is written."""
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text)
