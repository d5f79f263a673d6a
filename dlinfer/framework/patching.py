"""A patch on somebody else's library, as a record: what it replaces, why, for which versions and which signature.

A record is checked against the library it meets before it is applied, can be reverted, and reaches the copies
that other modules made by ``from module import name``.
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
"""The function that a replacement gets as its first argument."""


@dataclass(frozen=True)
class Patch:
    """One replacement.

    target: ``"package.module:Class.function"``.
    why: what is wrong or missing in the original, for the reader and for reports.
    build: takes the original, returns the replacement. ``replaces`` makes it from a function.
    signature: the original's parameters and defaults without annotations, as the replacement was written for them:
        ``"(self, path, config=None, **kwargs)"``.
    versions: the range of the package's versions that need it (PEP 440, ``">=1.2,<1.3"``), for patches on a fault that
        a later release may fix. Outside it the original stays. Empty: every version that the signature fits.
    essential: False where the package without the patch gives the same answers, with other words or less comfort.
        A misfit is then logged, and the package runs without the patch.
    for_models: the model types that need the patch. Empty: every model.
    for_feature: the feature that needs the patch. Empty: the patch is needed whatever is asked for.
    """

    target: str
    why: str
    signature: str
    build: Callable[[Original], Any]
    versions: str = ""
    essential: bool = True
    for_models: tuple[str, ...] = ()
    for_feature: str = ""

    @property
    def uses(self) -> tuple[str, ...]:
        """The model types and the feature that need the patch. Empty: everybody does."""
        return (*self.for_models, self.for_feature) if self.for_feature else self.for_models

    @property
    def module(self) -> str:
        """Name of the module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> list[str]:
        """Attribute path of the target inside its module."""
        return self.target.partition(":")[2].split(".")

    @property
    def home(self) -> str:
        """Name of the module that holds the replacement."""
        return self.build.__module__


def replaces(
    target: str,
    *,
    why: str,
    when: Callable[[], bool] | None = None,
    signature: str = "",
    versions: str = "",
    essential: bool = True,
    for_models: tuple[str, ...] = (),
    for_feature: str = "",
) -> Callable[[Callable[..., Any]], Patch]:
    """Decorator: turn a function that takes the original, then the original's arguments, into a Patch.

    when: asked at each call. False: the call goes to the original. None: the patch is always in force.
    signature: empty for that of the function behind its first parameter. The other arguments are Patch's.
    """

    def record(replace: Callable[..., Any]) -> Patch:
        @functools.wraps(replace)
        def build(original: Original) -> Callable[..., Any]:
            return _guarded(original, replace, when)

        expected = signature or bare_signature(replace, skip=1)
        return Patch(target, why, expected, build, versions, essential, for_models, for_feature)

    return record


def _guarded(
    original: Original, replace: Callable[..., Any], when: Callable[[], bool] | None
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if when is None or when():
            return replace(original, *args, **kwargs)
        return original(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    # Callers look at the function: FastAPI reads its signature, and whether it is a coroutine function.
    return functools.wraps(original)(call_async if inspect.iscoroutinefunction(original) else call)


def patches_of(module: ModuleType, package: str) -> list[Patch]:
    """The patches on a package that a module defines, in order, and those of its tuple ``PATCHES``."""
    defined = [value for value in vars(module).values() if isinstance(value, Patch)]
    patches = [patch for patch in defined if patch.home == module.__name__] + [
        *getattr(module, "PATCHES", ())
    ]
    return [patch for patch in patches if patch.target.startswith(f"{package}.")]


@dataclass
class _Applied:
    owner: Any
    name: str
    raw: Any
    aliases: list[tuple[ModuleType, str, Any]]


class PatchSet:
    """The patches on one package; applied as its modules appear, reverted all at once."""

    def __init__(self, package: str, patches: Iterable[Patch]) -> None:
        self.package = package
        self.patches = tuple(patches)
        self.refused: dict[str, PatchError] = {}
        self._applied: dict[str, _Applied] = {}
        self._pending = self._by_module()
        self._lock = threading.RLock()  # modules are imported in several threads at once

    def _by_module(self) -> dict[str, list[Patch]]:
        pending: dict[str, list[Patch]] = {}
        for patch in self.patches:
            pending.setdefault(patch.module, []).append(patch)
        return pending

    @property
    def applied(self) -> tuple[str, ...]:
        """Targets of the patches in force."""
        return tuple(self._applied)

    def apply_loaded(self) -> None:
        """Apply every pending patch whose target exists by now. A patch that does not fit is kept in ``refused``."""
        with self._lock:
            for name in list(self._pending):
                module = sys.modules.get(name)
                if module is None:
                    continue
                waiting = [patch for patch in self._pending[name] if not self._apply(module, patch)]
                if waiting:
                    self._pending[name] = waiting
                else:
                    del self._pending[name]

    def require_essential(self, uses: Collection[str] = ()) -> None:
        """Raise the first misfit of an essential patch that everybody needs, or that one of ``uses`` needs.

        uses: model types and features in use.
        """
        for patch, error in self.misfits():
            if patch.essential and (not patch.uses or any(use in uses for use in patch.uses)):
                raise error.again()

    def misfits(self) -> list[tuple[Patch, PatchError]]:
        """The patches that do not fit, with what a user is told."""
        if not self.refused:
            return []  # a backend asks at each step
        return [(patch, self.refused[patch.target]) for patch in self.patches if patch.target in self.refused]

    def revert(self) -> None:
        """Put every original back."""
        with self._lock:
            for applied in reversed(self._applied.values()):
                setattr(applied.owner, applied.name, applied.raw)
                for module, name, original in applied.aliases:
                    setattr(module, name, original)
            self._applied.clear()
            self.refused.clear()
            self._pending = self._by_module()

    def _apply(self, module: ModuleType, patch: Patch) -> bool:
        """False when the target does not exist yet in a module that is still being executed."""
        if not self.needs(patch):
            return True
        found = _resolve(module, patch.path)
        if found is None:
            if getattr(module.__spec__, "_initializing", False):
                return False
            self._refuse(patch, "the target does not exist")
            return True
        owner, name, raw = found
        original = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
        signature = bare_signature(original)
        if signature != patch.signature:
            self._refuse(patch, f"its signature is {signature}, not {patch.signature}")
            return True
        replacement = patch.build(original)
        setattr(owner, name, type(raw)(replacement) if original is not raw else replacement)
        aliases = list(self._rebind(module, original, replacement)) if owner is module else []
        self._applied[patch.target] = _Applied(owner, name, raw, aliases)
        return True

    def needs(self, patch: Patch) -> bool:
        """Whether the installed version of the package is one that needs a patch."""
        if not patch.versions:
            return True
        from packaging.specifiers import SpecifierSet

        return SpecifierSet(patch.versions).contains(self.version(), prereleases=True)

    def version(self) -> str:
        """The installed version of the package."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:  # on the path, but not installed
            return getattr(sys.modules.get(f"{self.package}.version"), "__version__", "0")

    def _refuse(self, patch: Patch, detail: str) -> None:
        error = PatchError(target=patch.target, package=self.package, version=self.version(), detail=detail)
        self.refused[patch.target] = error
        logger.debug("%s", error)

    def _rebind(
        self, home: ModuleType, original: Any, replacement: Any
    ) -> Iterator[tuple[ModuleType, str, Any]]:
        for name, module in list(sys.modules.items()):
            if module is home or not name.startswith(f"{self.package}."):
                continue
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)
                    yield module, attribute, original


def _resolve(module: ModuleType, path: list[str]) -> tuple[Any, str, Any] | None:
    owner: Any = module
    for part in path[:-1]:
        owner = getattr(owner, part, None)
        if owner is None:
            return None
    missing = object()
    raw = inspect.getattr_static(owner, path[-1], missing)
    return None if raw is missing else (owner, path[-1], raw)


def bare_signature(function: Callable[..., Any], skip: int = 0) -> str:
    """Parameters and defaults of a function without annotations, and without the first ``skip`` parameters."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()][skip:]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
