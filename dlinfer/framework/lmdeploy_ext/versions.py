"""Which LMDeploy releases this adaptor was tested with."""

from dlinfer.framework.patching import contains

FAULTY = ">=0.18.0,<0.19"
"""The tested releases. They have the faults that patches correct; a later one may have mended them in its own way."""


def describe(version: str) -> tuple[bool, str]:
    """Whether a version is inside the tested range, and one line that says so."""
    if contains(FAULTY, version):
        return True, f"lmdeploy {version} is inside the tested range ({FAULTY})"
    return False, f"lmdeploy {version} is outside the tested range ({FAULTY}); expect differences"
