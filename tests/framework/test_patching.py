"""Patches as records: applied when they fit, refused by name when they don't, reverted without a trace."""

import importlib
import sys
import textwrap
import threading

import pytest

from dlinfer.errors import PatchError
from dlinfer.framework.patching import Patch, PatchSet, bare_signature

LIBRARY = {
    "__init__": "",
    "version": "__version__ = '1.2'",
    "core": """
        def size(device: str = 'cuda') -> int:
            return 1

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
        ("victim.core:gone", "()", "the target does not exist"),
        ("victim.core:Gone.method", "()", "the target does not exist"),
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
    assert [error.fields["target"] for error in patches.done_without()] == ["victim.core:gone"]


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


def test_signatures_are_compared_without_annotations():
    def function(a: int, *rest: str, b: float = 1.0, **others: object) -> None: ...

    assert bare_signature(function) == "(a, *rest, b=1.0, **others)"
