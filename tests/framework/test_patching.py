"""Patches as records: applied when they fit, refused by name when they don't, reverted without a trace."""

import asyncio
import importlib
import inspect
import sys
import textwrap
import threading
from importlib import metadata

import pytest

from dlinfer.errors import PatchError
from dlinfer.framework.patching import Patch, PatchSet, bare_signature, patches_of, replaces

LIBRARY = {
    "__init__": "",
    "version": "__version__ = '1.2'",
    "core": """
        def size(device: str = 'cuda') -> int:
            return 1

        async def pause(seconds):
            return seconds

        class Engine:
            def start(self, path: str, *, retries=3):
                return 'original'

            @staticmethod
            def pick(name):
                return name

            @classmethod
            def make(cls):
                return cls()
    """,
    "user": "from victim.core import size",
}


@pytest.fixture
def victim(tmp_path, monkeypatch):
    folder = tmp_path / "victim"
    folder.mkdir()
    for name, source in LIBRARY.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: importlib.import_module(f"victim.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "victim"]:
        del sys.modules[name]


def patch(target, signature, replacement):
    return Patch(target, "for the test", signature, lambda original: replacement)


def test_a_function_and_the_copies_of_its_name_are_replaced_and_reverted(victim):
    user, core = victim("user"), victim("core")
    original = core.size
    patches = PatchSet("victim", [patch("victim.core:size", "(device='cuda')", lambda device="cuda": 2)])
    patches.apply_loaded()
    assert (core.size(), user.size()) == (2, 2)
    assert patches.applied == ("victim.core:size",)
    patches.revert()
    assert core.size is original and user.size is original
    patches.apply_loaded()
    assert user.size() == 2


def test_two_patches_on_one_function_are_both_in_force_and_both_reverted(victim):
    core = victim("core")
    original = core.size

    @replaces("victim.core:size", why="for the test")
    def more(original, device="cuda"):
        return original(device) + 1

    @replaces("victim.core:size", why="for the test")
    def tenfold(original, device="cuda"):
        return original(device) * 10

    patches = PatchSet("victim", [more, tenfold])
    patches.apply_loaded()
    patches.require_essential()
    assert core.size() == 20
    patches.revert()
    assert core.size is original


def test_threads_that_import_at_once_apply_a_patch_once(victim):
    core = victim("core")
    built = []

    def build(original):
        built.append(original)
        if len(built) == 1:
            other.start()
            other.join(0.2)  # it waits for this thread, however long it is given
        return lambda device="cuda": original(device) + 1

    patches = PatchSet("victim", [Patch("victim.core:size", "for the test", "(device='cuda')", build)])
    other = threading.Thread(target=patches.apply_loaded)
    patches.apply_loaded()
    other.join()
    assert len(built) == 1
    assert core.size() == 2


def test_methods_keep_their_kind(victim):
    core = victim("core")
    patches = PatchSet(
        "victim",
        [
            patch(
                "victim.core:Engine.start",
                "(self, path, *, retries=3)",
                lambda self, path, *, retries=3: path,
            ),
            patch("victim.core:Engine.pick", "(name)", lambda name: name.upper()),
            patch("victim.core:Engine.make", "(cls)", lambda cls: cls.__name__),
        ],
    )
    patches.apply_loaded()
    patches.require_essential()
    assert core.Engine().start("p") == "p"
    assert core.Engine.pick("a") == core.Engine().pick("a") == "A"
    assert core.Engine.make() == "Engine"
    patches.revert()
    assert core.Engine().start("p") == "original" and isinstance(core.Engine.make(), core.Engine)


@pytest.mark.parametrize(
    ("target", "signature", "detail"),
    [
        ("victim.core:size", "(device='cpu')", "its signature is (device='cuda'), not (device='cpu')"),
        ("victim.core:gone", "()", "this function does not exist"),
        ("victim.core:Gone.method", "()", "this function does not exist"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_by_name_and_changes_nothing(victim, target, signature, detail):
    core, _ = victim("core"), victim("version")
    patches = PatchSet("victim", [patch(target, signature, lambda: None)])
    patches.apply_loaded()
    assert core.size() == 1 and patches.applied == ()
    with pytest.raises(PatchError) as caught:
        patches.require_essential()
    assert detail in str(caught.value) and target in str(caught.value) and "1.2" in str(caught.value)


def test_a_patch_that_is_not_essential_is_done_without(victim):
    core, _ = victim("core"), victim("version")
    cosmetic = Patch("victim.core:gone", "words only", "()", lambda _: lambda: None, essential=False)
    needed = patch("victim.core:size", "(device='cuda')", lambda device="cuda": 2)
    patches = PatchSet("victim", [cosmetic, needed])
    patches.apply_loaded()
    patches.require_essential()
    assert core.size() == 2
    assert [patch.target for patch, _ in patches.misfits()] == ["victim.core:gone"]


def test_a_module_that_is_not_loaded_yet_is_patched_when_it_is(victim):
    patches = PatchSet("victim", [patch("victim.core:size", "(device='cuda')", lambda device="cuda": 2)])
    patches.apply_loaded()
    assert patches.applied == () and not patches.refused
    core = victim("core")
    patches.apply_loaded()
    assert core.size() == 2


@pytest.mark.parametrize(("versions", "size"), [(">=1.0,<1.3", 2), (">=1.3", 1), ("", 2)])
def test_outside_its_versions_a_patch_leaves_the_original_and_is_no_misfit(victim, versions, size):
    core, _ = victim("core"), victim("version")
    record = Patch(
        "victim.core:size", "a fault of 1.2", "(device='cuda')", lambda _: lambda device="cuda": 2, versions
    )
    patches = PatchSet("victim", [record])
    patches.apply_loaded()
    patches.require_essential()
    assert core.size() == size


def test_the_version_is_looked_up_once(monkeypatch):
    asked = []
    monkeypatch.setattr(metadata, "version", lambda package: asked.append(package) or "1.0")
    for _ in range(2):
        assert PatchSet("looked_up_once", []).version() == "1.0"
    assert asked == ["looked_up_once"]


def test_signatures_are_compared_without_annotations():
    def function(a: int, *rest: str, b: float = 1.0, **others: object) -> None: ...

    assert bare_signature(function) == "(a, *rest, b=1.0, **others)"


def test_a_decorated_replacement_is_in_force_while_its_condition_holds(victim):
    core, is_on = victim("core"), [False]

    @replaces("victim.core:Engine.start", why="for the test", when=lambda: is_on[0])
    def start(original, self, path, *, retries=3):
        return f"{path} {retries} not {original(self, path)}"

    assert isinstance(start, Patch) and start.signature == "(self, path, *, retries=3)"
    assert start.home == __name__
    patches = PatchSet("victim", [start])
    patches.apply_loaded()
    patches.require_essential()
    engine = core.Engine()
    assert engine.start("p", retries=1) == "original"
    is_on[0] = True
    assert engine.start("p", retries=1) == "p 1 not original"
    assert bare_signature(core.Engine.start) == start.signature


def test_a_replacement_may_have_every_kind_of_parameter():
    def join(*values, **named):
        return values, named

    def replacement(original, self, a, /, b, c=3, *rest, d, e=5, **more):
        return original(self, a, b, c, *rest, d=d, e=e, **more)

    for when in (None, lambda: True):
        call = replaces("victim.core:size", why="for the test", when=when)(replacement).build(join)
        assert call(0, 1, b=2, d=4) == ((0, 1, 2, 3), {"d": 4, "e": 5})
        assert call(0, 1, 2, 6, 7, 8, d=4, e=9, f=10) == ((0, 1, 2, 6, 7, 8), {"d": 4, "e": 9, "f": 10})
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'd'"):
            call(0, 1, 2)


def test_a_replaced_coroutine_function_is_still_one(victim):
    @replaces("victim.core:pause", why="for the test", when=lambda: True, signature="(seconds)")
    async def pause(original, *args):
        return await original(*args) + 1

    core = victim("core")
    PatchSet("victim", [pause]).apply_loaded()
    assert inspect.iscoroutinefunction(core.pause)
    assert asyncio.run(core.pause(1)) == 2


def test_the_patches_of_a_module_come_in_order_and_without_foreign_ones(victim):
    def record(target, home):
        def replacement(original): ...

        replacement.__module__ = home
        return replaces(target, why="for the test")(replacement)

    module = victim("core")
    module.first, module.foreign = (
        record("victim.core:size", "victim.core"),
        record("victim.core:b", "victim.user"),
    )
    module.elsewhere = record("other.core:size", "victim.core")
    module.PATCHES = tuple(record(f"victim.core:Engine.{name}", "victim.core") for name in ("start", "pick"))
    targets = [patch.target for patch in patches_of(module, "victim")]
    assert targets == ["victim.core:size", "victim.core:Engine.start", "victim.core:Engine.pick"]


@pytest.mark.parametrize(
    ("scope", "uses", "stops"),
    [
        ({}, (), True),
        ({"for_models": ("llama", "phi3")}, (), False),
        ({"for_models": ("llama", "phi3")}, ("phi3",), True),
        ({"for_models": ("llama",)}, ("phi3", "drafts"), False),
        ({"for_feature": "drafts"}, ("phi3",), False),
        ({"for_feature": "drafts"}, ("phi3", "drafts"), True),
    ],
)
def test_a_misfit_stops_those_who_need_the_patch(victim, scope, uses, stops):
    for module in ("core", "version"):
        victim(module)
    patches = PatchSet("victim", [replaces("victim.core:gone", why="for the test", **scope)(lambda _: None)])
    patches.apply_loaded()
    assert len(patches.misfits()) == 1
    if stops:
        with pytest.raises(PatchError, match=r"victim\.core:gone"):
            patches.require_essential(uses)
    else:
        patches.require_essential(uses)
