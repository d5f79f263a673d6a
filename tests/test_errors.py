"""Every error that a user can meet has the fields of its template, says what to do, and can be pickled."""

import ast
import copy
import importlib
import inspect
import pickle
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlinfer import errors
from dlinfer.errors import DlinferError

PACKAGE = Path(errors.__file__).parent
OWN = [
    importlib.import_module(f"dlinfer.{path.parent.parent.name}.{path.parent.name}.errors")
    for path in sorted((*PACKAGE.glob("vendor/*/errors.py"), *PACKAGE.glob("framework/*/errors.py")))
]
"""A vendor's own errors, and an adaptor's, stand in its folder, in the same form."""

CLASSES = {
    name: cls
    for module in (errors, *OWN)
    for name, cls in vars(module).items()
    if inspect.isclass(cls) and issubclass(cls, DlinferError) and cls is not DlinferError
}


def template_fields(cls: type[DlinferError]) -> set[str]:
    parts = string.Formatter().parse(cls.message + cls.next_step)
    return {name for _, name, _, _ in parts if name}


def example(cls: type[DlinferError]) -> DlinferError:
    return cls(**{name: f"<the {name}>" for name in template_fields(cls)})


def named(node: ast.AST) -> str:
    """The last part of a name: SettingError for ``SettingError`` and for ``errors.SettingError``."""
    return getattr(node, "attr", getattr(node, "id", ""))


def calls() -> Iterator[tuple[str, type[DlinferError], ast.Call]]:
    """(file:line, class, call) of every place in the package that makes one of the errors."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and named(node.func) in CLASSES:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", CLASSES[named(node.func)], node


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_the_message_shows_every_field(cls):
    text = str(example(cls))
    for name in template_fields(cls):
        assert f"<the {name}>" in text
    assert "\n" not in text


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_it_survives_pickling_and_copying(cls):
    error = example(cls)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is cls
        assert str(again) == str(error)
        assert again.fields == error.fields


# These say what was expected instead of a separate step. KernelDeclined never reaches a user: the kernel
# table turns it into a fallback, whose own message has the step.
SHOWS_WHAT_IS_RIGHT = {"OpArgumentError": "expected", "OpCallError": "schema", "UnknownOpError": "known"}
INTERNAL = {"KernelDeclined"}


@pytest.mark.parametrize("name", CLASSES)
def test_it_says_what_to_do(name):
    cls = CLASSES[name]
    if name in SHOWS_WHAT_IS_RIGHT:
        assert f"<the {SHOWS_WHAT_IS_RIGHT[name]}>" in str(example(cls))
    elif name not in INTERNAL:
        assert f"Next step: {example(cls).step}" in str(example(cls))
        assert cls.next_step


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_it_can_be_caught_as_the_builtin_of_its_kind(cls):
    builtins = {base for base in cls.__mro__ if base.__module__ == "builtins"}
    assert builtins - {BaseException, Exception, object}


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_it_is_documented(cls):
    assert inspect.getdoc(cls) != inspect.getdoc(DlinferError)


def test_a_field_that_is_forgotten_is_noticed_at_once():
    with pytest.raises(KeyError, match="given"):
        errors.SettingError(variable="DLINFER_X", expected="y")


def test_braces_in_a_field_are_kept_as_they_are():
    assert "{x}" in str(errors.KernelDeclined(reason="{x}"))


def test_a_kernel_gives_its_reason_by_position():
    declined = errors.KernelDeclined("rows of 7")
    assert str(declined) == "rows of 7" and declined.fields == {"reason": "rows of 7"}
    assert pickle.loads(pickle.dumps(declined)).fields == declined.fields


def test_every_place_gives_the_fields_of_the_template():
    wrong = []
    for place, cls, call in calls():
        given = {keyword.arg for keyword in call.keywords}
        expected = template_fields(cls)
        if call.args or given not in (
            expected,
            expected | {"advice"},
        ):  # advice replaces any class's next step
            wrong.append(f"{place}: {cls.__name__} takes {sorted(expected)}")
    assert wrong == []


def test_every_class_is_in_use():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "errors.py":
            used |= {named(node) for node in ast.walk(ast.parse(path.read_text()))}
    families = {base.__name__ for cls in CLASSES.values() for base in cls.__bases__}  # for ``except``
    assert set(CLASSES) - used - families == set()
