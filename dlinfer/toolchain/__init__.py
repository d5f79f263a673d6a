"""Toolchains: environments of an older CPython with a vendor's compiler or runtime, beside this one.

A vendor whose packages exist only for an older Python has a recipe (``Toolchain``, named in ``Vendor.toolchain``).
``install`` makes its environment in the user's cache folder, ``find`` gives it to the vendor's code; nothing else of
dlinfer needs one.
"""

from dlinfer.toolchain.folder import Environment, State, find, folder, state
from dlinfer.toolchain.recipe import Toolchain

__all__ = ["Environment", "State", "Toolchain", "find", "folder", "state"]
