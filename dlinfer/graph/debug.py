"""What ``DLINFER_DEBUG`` prints."""

import sys

from dlinfer import settings


def wanted(topic: str) -> bool:
    """Whether DLINFER_DEBUG names a topic. Raises SettingError where it names one that does not exist."""
    topics = {word.strip() for word in settings.current().debug.split(",")}
    return topic in topics or "all" in topics


def show(topic: str, title: str, text: str) -> None:
    """Print to stderr when the topic is asked for."""
    if wanted(topic):
        print(f"dlinfer {topic}: {title}\n{text}", file=sys.stderr)
