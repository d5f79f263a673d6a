"""The recipe of MegEngine's toolchain: MegEngine Lite's C library, and MegEngine itself, which builds models.

MegEngine's package (on PyPI, for CPython up to 3.10) depends on large packages that only download data sets. The recipe
omits these packages. One of them, megfile, is imported by ``import megengine``, so a stub takes its place.
"""

from dlinfer.toolchain.recipe import Toolchain

# The recipe's digest covers this text: any change to it reinstalls every environment.
_MEGFILE = (
    '"""Stands in for megfile, by '
    + '''which megengine.hub downloads; nothing is downloaded here."""


def _missing(*args, **kwargs):
    raise RuntimeError("downloads need the package megfile, which is not here")


smart_copy = smart_getmd5 = smart_getsize = _missing
'''
)

TOOLCHAIN = Toolchain(
    name="megengine",
    summary="MegEngine Lite's C library and the builder of its models (MegEngine 1.13.0)",
    python="3.10",
    packages=(
        "MegEngine==1.13.0",
        "numpy==1.23.5",
        "opencv-python-headless==4.8.0.76",
        "tqdm==4.70.1",
        "Deprecated==1.3.1",
        "wrapt==2.5.2",
        "mprop==0.17.0",
        "filelock==4.1.0",
        "requests==2.34.2",
        "urllib3==2.8.0",
        "idna==3.20",
        "certifi==2026.10.18",
        "charset-normalizer==3.5.2",
    ),
    installed_bytes=1_900_000_000,
    download_bytes=1_800_000_000,
    files={"megfile.py": _MEGFILE},
    check="import megengine, megengine.functional, megengine.jit",
)
