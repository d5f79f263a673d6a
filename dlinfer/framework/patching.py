"""Patches that replace functions of another library.

Each patch names the function that it replaces (its target), the reason, and the versions and the signature that it was
written for. Before a patch is applied, it is compared with the installed library. Applied patches can be reverted. If
other modules hold the target because of ``from module import name``, the patch is also set there.
"""

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from dlinfer.errors import PatchError

logger = logging.getLogger("dlinfer")

Original = Callable[..., Any]
"""The function that a patch replaces. The replacement gets it as its first argument."""


@dataclass(frozen=True)
class Patch:
    """One replacement of a function.

    target: ``"package.module:Class.function"``.
    why: the fault or the gap of the original, as a verb phrase without a subject, such as "drops the second text".
        Reports put a subject before it: "A patch replaces it, because the reviewed one drops the second text."
    signature: the parameters and defaults of the original that the replacement was written for, without annotations:
        ``"(self, path, config=None, **kwargs)"``.
    build: a function that takes the original and returns the replacement. ``replaces`` makes ``build`` from a function.
    versions: the versions of the package that need the patch (PEP 440, ``">=1.2,<1.3"``), for faults that a later
        release may fix. Other versions keep the original. Empty: all versions need the patch.
    upstream: the address of the issue or pull request about the fault. Empty: not reported.
    essential: whether the package gives wrong answers, or none, without the patch. If a patch that is not essential
        does not match the installed function, the mismatch is logged and the package runs without the patch.
    for_models: the model types that need the patch. Empty: every model.
    for_feature: the feature that needs the patch. Empty: the patch is needed whatever features are in use.
    """

    target: str
    why: str
    signature: str
    build: Callable[[Original], Any]
    versions: str = ""
    upstream: str = ""
    essential: bool = True
    for_models: tuple[str, ...] = ()
    for_feature: str = ""

    @property
    def uses(self) -> tuple[str, ...]:
        """The model types and the feature that need the patch. Empty: every model needs the patch."""
        return (*self.for_models, self.for_feature) if self.for_feature else self.for_models

    @functools.cached_property
    def module(self) -> str:
        """Name of the module that holds the target.

        It is cached because each import reads it for all pending patches.
        """
        return self.target.partition(":")[0]

    @property
    def path(self) -> list[str]:
        """Names of the attributes that lead from the module to the target, such as ``["Class", "function"]``."""
        return self.target.partition(":")[2].split(".")

    @property
    def home(self) -> str:
        """Name of the module that holds the replacement."""
        return self.build.__module__


def replaces(
    target: str, *, why: str, when: Callable[[], bool] | None = None, signature: str = "", **fields: Any
) -> Callable[[Callable[..., Any]], Patch]:
    """Return a decorator that turns a function into a Patch.

    The decorated function is the replacement. Its first parameter takes the original, and the others take the call's
    arguments.

    when: a condition, asked before each call. If it returns False, the original runs. None: the replacement always
        runs.
    signature: the signature of the original. Empty: that of the decorated function, without the first parameter.
    fields: further fields of Patch.
    """

    def record(replacement: Callable[..., Any]) -> Patch:
        @functools.wraps(replacement)
        def build(original: Original) -> Callable[..., Any]:
            return _guarded(original, replacement, when)

        return Patch(target, why, signature or bare_signature(replacement, skip=1), build, **fields)

    return record


_FORWARDED = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
}


def _guarded(
    original: Original, replacement: Callable[..., Any], when: Callable[[], bool] | None
) -> Callable[..., Any]:
    """Return a function that calls the replacement or, if ``when`` returns False, the original.

    The function has the replacement's parameters, because calls through ``*args`` would be slower.
    """
    plain: Any = inspect.unwrap(replacement)
    parameters = list(inspect.signature(plain).parameters.values())[1:]
    declared = inspect.Signature([p.replace(annotation=p.empty, default=p.empty) for p in parameters])
    arguments = ", ".join(_FORWARDED.get(p.kind, "{0}").format(p.name) for p in parameters)
    # Callers look at the function: FastAPI reads its signature, and whether it is a coroutine function.
    prefix, wait = ("async ", "await ") if inspect.iscoroutinefunction(original) else ("", "")
    scope: dict[str, Any] = {}
    exec(
        f"""
def make(_original, _replacement, _when):
    {prefix}def call{declared}:
        if {"True" if when is None else "_when()"}:
            return {wait}_replacement(_original, {arguments})
        return {wait}_original({arguments})
    return call
""",
        scope,
    )
    call = scope["make"](original, replacement, when)
    call.__defaults__, call.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    return functools.wraps(original)(call)


@functools.cache
def _installed(package: str) -> str:
    """Return ``metadata.version``, which parses a file at each call. There are hundreds of patches."""
    return metadata.version(package)


@functools.cache
def contains(versions: str, version: str) -> bool:
    """Return whether a version is in a range of versions (PEP 440). The range "" contains every version."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(versions).contains(version, prereleases=True)


def patches_of(module: ModuleType, package: str) -> list[Patch]:
    """Return the patches on ``package`` in a module: the patches defined there, then those in its tuple ``PATCHES``."""
    defined = [value for value in vars(module).values() if isinstance(value, Patch)]
    own = [patch for patch in defined if patch.home == module.__name__]
    patches = (*own, *getattr(module, "PATCHES", ()))
    return [patch for patch in patches if patch.target.startswith(f"{package}.")]


_Place = tuple[Any, str, Any]
"""(an object, the name of one of its attributes, the attribute's value before the patch)."""


class PatchSet:
    """The patches of one package. They are applied as the package's modules are imported, and reverted all at once."""

    def __init__(self, package: str, patches: Iterable[Patch]) -> None:
        self.package = package
        self.patches = tuple(patches)
        self.refused: dict[str, PatchError] = {}
        self._applied: dict[str, list[_Place]] = {}
        self._pending = list(self.patches)
        self._lock = threading.RLock()  # modules are imported in several threads at once

    @property
    def applied(self) -> tuple[str, ...]:
        """The targets of the patches that are applied now."""
        return tuple(self._applied)

    def apply_loaded(self) -> None:
        """Apply each pending patch whose target exists by now.

        ``refused`` keeps the error of a patch that does not match.
        """
        with self._lock:
            self._pending = [patch for patch in self._pending if not self._apply(patch)]

    def require_essential(self, uses: Collection[str] = ()) -> None:
        """Raise the PatchError of the first essential patch that is needed and does not match its target.

        uses: the model types and features in use. A patch is needed if it is for one of them, or for every model.
        """
        for patch, error in self.misfits():
            if patch.essential and (not patch.uses or any(use in uses for use in patch.uses)):
                raise error.again()

    def misfits(self) -> list[tuple[Patch, PatchError]]:
        """Return the patches that do not match their targets, each with its error."""
        if not self.refused:
            return []  # a quick way out: a backend calls this at each step
        return [(patch, self.refused[patch.target]) for patch in self.patches if patch.target in self.refused]

    def revert(self) -> None:
        """Put every original back."""
        with self._lock:
            for places in reversed(self._applied.values()):
                for owner, name, value in reversed(places):
                    setattr(owner, name, value)
            self._applied.clear()
            self.refused.clear()
            self._pending = list(self.patches)

    def _apply(self, patch: Patch) -> bool:
        """Apply or refuse a patch. Return False if its target does not exist yet, so that a later import tries again.

        That is the case while the target's module is not imported, or is still being executed.
        """
        module = sys.modules.get(patch.module)
        if module is None:
            return False
        if not self.needs(patch):
            return True
        owner: Any = module
        *outer, name = patch.path
        for part in outer:
            owner = getattr(owner, part, None)
        raw = None if owner is None else inspect.getattr_static(owner, name, None)
        if raw is None:
            if getattr(module.__spec__, "_initializing", False):
                return False
            self._refuse(patch, "this function does not exist")
            return True
        original = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        signature = bare_signature(original)
        if signature != patch.signature:
            self._refuse(patch, f"its signature is {signature}, not {patch.signature}")
            return True
        replacement = patch.build(original)
        setattr(owner, name, type(raw)(replacement) if original is not raw else replacement)
        aliases = self._rebind(module, original, replacement) if owner is module else ()
        self._applied.setdefault(patch.target, []).extend([(owner, name, raw), *aliases])
        return True

    def needs(self, patch: Patch) -> bool:
        """Return whether the installed version of the package needs a patch."""
        return contains(patch.versions, self.version())

    def version(self) -> str:
        """Return the installed version of the package."""
        try:
            return _installed(self.package)
        except metadata.PackageNotFoundError:  # importable, but not installed as a package
            return getattr(sys.modules.get(f"{self.package}.version"), "__version__", "0")

    def _refuse(self, patch: Patch, detail: str) -> None:
        error = PatchError(target=patch.target, package=self.package, version=self.version(), detail=detail)
        self.refused[patch.target] = error
        logger.debug("%s", error)

    def _rebind(self, home: ModuleType, original: Any, replacement: Any) -> Iterator[_Place]:
        for name, module in list(sys.modules.items()):
            if module is home or not name.startswith(f"{self.package}."):
                continue
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)
                    yield module, attribute, original


def bare_signature(function: Callable[..., Any], skip: int = 0) -> str:
    """Return a function's parameters and defaults as text, without annotations.

    skip: the number of parameters to leave out at the start. A default that is a member of an enum is shown by its
    name, because its value may differ between releases.
    """
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[skip:]
    bare = [p.replace(annotation=inspect.Parameter.empty, default=_shown(p.default)) for p in parameters]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class _Name:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _shown(default: Any) -> Any:
    """Return ``default``, but a member of an enum as its name. C++ enums, such as torch's ReduceOp, count as enums."""
    names = [name for name, member in getattr(type(default), "__members__", {}).items() if member == default]
    return _Name(names[0]) if names else default
