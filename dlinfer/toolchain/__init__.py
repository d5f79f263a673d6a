"""Toolchains: separate Python environments of an older CPython, with a vendor's compiler or runtime.

Some packages of vendors exist only for an older Python. Such a vendor has a recipe (``Toolchain``) in
``Vendor.toolchain``. ``install`` creates the environment of a recipe in the user's cache folder, and ``find`` returns
its paths to the vendor's code. No other part of dlinfer needs an environment.
"""

from dlinfer.toolchain.folder import Environment, State, find, folder, state
from dlinfer.toolchain.recipe import Toolchain

__all__ = ["Environment", "State", "Toolchain", "find", "folder", "state"]
