"""An engine's options as a dataclass: each field says what it takes, and a wrong value names it."""

from dataclasses import dataclass

import pytest

from dlinfer.errors import CompileOptionError
from dlinfer.graph.engine_kit.options import EngineOptions, one_of, option, text, whole


@dataclass(frozen=True)
class Options(EngineOptions):
    kind: str = option("plain", one_of("", "plain", "fancy"))
    count: int = option(0, whole(0))
    even: int = option(2, whole(2, "an even number", lambda value: value % 2 == 0))
    name: str = option("x", text("a name"))
    doubled: int = option(1, lambda given: max(given, 2))


def test_what_is_not_given_has_its_default_read_as_a_given_one():
    assert Options.of({}) == Options()
    assert Options().doubled == 2
    assert Options.of({"kind": "", "count": 3, "even": 4}) == Options(kind="", count=3, even=4)


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"colour": 1}, "colour", "one of the engine's options: kind, count, even, name, doubled"),
        ({"kind": "other"}, "kind", "one of 'plain', 'fancy'"),
        ({"kind": ["plain"]}, "kind", "one of 'plain', 'fancy'"),
        ({"count": -1}, "count", "a whole number of at least 0"),
        ({"count": True}, "count", "a whole number of at least 0"),
        ({"count": 1.0}, "count", "a whole number of at least 0"),
        ({"even": 3}, "even", "an even number"),
        ({"name": ""}, "name", "a name"),
        ({"name": 3}, "name", "a name"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given, name, expected):
    with pytest.raises(CompileOptionError) as caught:
        Options.of(given)
    assert caught.value.fields["option"] == f"engine_options[{name!r}]"
    assert caught.value.fields["given"] == given[name]
    assert caught.value.fields["expected"] == expected


def test_an_engine_without_options_says_so():
    with pytest.raises(CompileOptionError, match="none: it has no options"):
        EngineOptions.of({"a": 1})
