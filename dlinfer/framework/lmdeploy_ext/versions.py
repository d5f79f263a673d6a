"""Which LMDeploy releases this adaptor was tested with."""

TESTED = (">=0.18.0", "<0.19")

FAULTY = ",".join(TESTED)
"""The releases known to have the faults that patches correct; a later one may have mended them in its own way."""


def describe(version: str) -> tuple[bool, str]:
    """Whether a version is inside the tested range, and one line that says so."""
    from packaging.specifiers import SpecifierSet

    wanted = ",".join(TESTED)
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return True, f"lmdeploy {version} is inside the tested range ({wanted})"
    return False, f"lmdeploy {version} is outside the tested range ({wanted}); expect differences"
