"""Which LMDeploy releases this adaptor was tested with."""

TESTED = (">=0.18.0", "<0.19")

FAULTY = ",".join(TESTED)
"""The releases known to have the faults that patches correct; a later one may have mended them in its own way."""


def describe(version: str) -> tuple[bool, str]:
    """Whether a version is inside the tested range, and one line that says so."""
    wanted = ",".join(TESTED)
    if contains(wanted, version):
        return True, f"lmdeploy {version} is inside the tested range ({wanted})"
    return False, f"lmdeploy {version} is outside the tested range ({wanted}); expect differences"


def contains(wanted: str, version: str) -> bool:
    """Whether a range of versions (PEP 440) holds one; the empty one holds all."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(version, prereleases=True)
