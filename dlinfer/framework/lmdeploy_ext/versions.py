"""States the LMDeploy releases that this adaptor was tested with."""

from dlinfer.framework.patching import contains

FAULTY = ">=0.18.0,<0.19"
"""The tested LMDeploy releases. They have the faults that our patches correct; later releases may have fixed them."""


def describe(version: str) -> tuple[bool, str]:
    """Return whether an LMDeploy version is in the range that the adaptor was tested with, and the answer as text."""
    if contains(FAULTY, version):
        return True, f"lmdeploy {version} is inside the tested range ({FAULTY})"
    return False, f"lmdeploy {version} is outside the tested range ({FAULTY}); expect differences"
