"""Add texts to torch's structured log, which TORCH_TRACE writes and tlparse shows."""

from collections.abc import Callable

from torch._logging import trace_structured  # pyright: ignore[reportPrivateImportUsage]


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to the log under a name. torch calls ``text`` only if it writes the log."""
    trace_structured("artifact", lambda: {"name": name, "encoding": "string"}, payload_fn=text)
