"""Which LMDeploy releases this adaptor was tested with, and what differs between them."""

import functools

TESTED = (">=0.17.0", "<0.19")

FAULTY = ",".join(TESTED)
"""The releases known to have the faults that patches correct; a later one may have mended them in its own way."""

FAULTY_SINCE_0_18 = ">=0.18.0.dev0,<0.19"
"""Faults that came with 0.18."""

BUILD_SPECS = ">=0.18.0.dev0"
"""Releases that ask a backend for layers by a BuildSpec, and that give layers block caches of their own."""

OP_TYPES = "<0.18.0.dev0"
"""Releases before: layers by an OpType (``layers/op_types.py``), one kind of block cache for keys and values."""


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


NEEDS = {
    "layers.linear_attention.step_states": BUILD_SPECS,
    "layers.sparse_attention.indexer": BUILD_SPECS,
    "preflight.block_cache_plan": BUILD_SPECS,
}
"""Module of ours, in this room -> the releases that it can be imported with; the others never ask for it."""


@functools.cache
def has_build_specs() -> bool:
    """Whether the installed LMDeploy is of ``BUILD_SPECS``."""
    from lmdeploy.version import __version__

    return contains(BUILD_SPECS, __version__)
