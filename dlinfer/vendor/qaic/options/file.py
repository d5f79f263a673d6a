"""Read a Session's options from a YAML file."""

from pathlib import Path
from typing import Any

from dlinfer.vendor.qaic.errors import QaicOptionError, QaicUnavailableError


def read_options(path: Any) -> dict[str, Any]:
    """Return the options in a YAML file, which must be a mapping. YAML tags that create Python objects are refused.

    Raises QaicOptionError if the file cannot be read or is not a mapping.
    Raises QaicUnavailableError if pyyaml is not installed.
    """
    try:
        import yaml
    except ImportError as cause:
        raise QaicUnavailableError(
            what="read options_path",
            missing="the package pyyaml is not installed",
            advice="pip install pyyaml",
        ) from cause
    if not isinstance(path, (str, Path)) or not str(path):
        raise _refused(path, "a path to a YAML file")
    try:
        # Only the bytes are read in this block, so that an OSError is the file's fault.
        text = Path(path).read_bytes()
    except OSError as cause:
        raise _refused(path, f"a readable YAML file ({cause.strerror})") from cause
    try:
        read = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as cause:  # ValueError: dates and numbers out of range
        raise _refused(path, f"a YAML file ({' '.join(str(cause).split())})") from cause
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise _refused(path, f"a YAML mapping of option to value, not a {type(read).__name__}")
    return read


def _refused(path: Any, expected: str) -> QaicOptionError:
    return QaicOptionError(option="options_path", given=str(path), expected=expected)
