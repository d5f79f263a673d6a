"""The output of ``DLINFER_DEBUG``."""

import sys

from dlinfer import settings


def wanted(topic: str) -> bool:
    """Return whether DLINFER_DEBUG names ``topic`` or ``all``. Raises SettingError if it names an unknown topic."""
    topics = {word.strip() for word in settings.current().debug.split(",")}
    return topic in topics or "all" in topics


def show(topic: str, title: str, text: str) -> None:
    """Print a title and a text to stderr if DLINFER_DEBUG names ``topic``."""
    if wanted(topic):
        print(f"dlinfer {topic}: {title}\n{text}", file=sys.stderr)
