"""Toolchains: separate Python environments of an older CPython, with a vendor's compiler or runtime.

If a vendor's packages exist only for an older Python, the vendor has a recipe (``Toolchain``, named in
``Vendor.toolchain``). ``install`` creates the recipe's environment in the user's cache folder, and ``find`` returns it
to the vendor's code. No other part of dlinfer needs an environment.
"""

from dlinfer.toolchain.folder import Environment, State, find, folder, state
from dlinfer.toolchain.recipe import Toolchain

__all__ = ["Environment", "State", "Toolchain", "find", "folder", "state"]
