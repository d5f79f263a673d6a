"""Sizes as text: what Python would compute, by a closed grammar, and nothing but sizes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlinfer.graph.torch_private.expressions import Size, SizeTextError, parse_condition, parse_size

NUMBERS = st.integers(min_value=0, max_value=1 << 40).map(str)
SYMBOLS = st.sampled_from(["s0", "s1", "u12"])
VALUES = {"s0": 7, "s1": 64, "u12": 1}


def operations(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.tuples(parts, st.sampled_from("+ - * // %".split()), parts)
    extremes = st.tuples(st.sampled_from(["min", "max"]), st.lists(parts, min_size=2, max_size=3))
    return st.one_of(
        pairs.map(lambda one: f"({one[0]}) {one[1]} ({one[2]})"),
        parts.map(lambda one: f"-({one})"),
        extremes.map(lambda one: f"{one[0]}({', '.join(one[1])})"),
    )


SIZES = st.recursive(NUMBERS | SYMBOLS, operations, max_leaves=12)


def outcome(compute):
    try:
        return compute()
    except ZeroDivisionError:
        return "division by zero"


def parsed(parse, text):
    """A size; None for one that sympy finds to divide by zero."""
    try:
        return parse(text)
    except SizeTextError as error:
        if isinstance(error.__cause__, ZeroDivisionError):
            return None
        raise


@given(SIZES)
def test_what_is_written_is_read_again_and_means_what_python_means(text):
    size = parsed(parse_size, text)
    expected = outcome(lambda: eval(text, {"min": min, "max": max}, VALUES))
    if size is not None and expected != "division by zero":  # a factor of 0 hides it
        assert size.evaluate(VALUES) == expected
        if all(len(number) < 19 for number in re.findall(r"\d+", str(size))):  # constants are folded
            assert parse_size(str(size)).evaluate(VALUES) == expected
    if size is None:
        assert expected == "division by zero"


@given(SIZES, st.sampled_from("== != <= < >= >".split()), SIZES)
def test_conditions_too(left, sign, right):
    condition = parsed(parse_condition, f"{left} {sign} {right}")
    expected = outcome(lambda: eval(f"({left}) {sign} ({right})", {"min": min, "max": max}, VALUES))
    if condition is not None and expected != "division by zero":
        assert condition.evaluate(VALUES) == expected


@given(st.text(max_size=40) | st.text("s01()+-*/%<=>!,. minax", max_size=40) | st.none() | st.floats())
def test_any_other_text_is_refused_with_our_error(text):
    for parse in (parse_size, parse_condition):
        try:
            result = parse(text)
        except SizeTextError:
            continue
        assert isinstance(result, Size)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s0 s1",
        "s0 +",
        "(s0",
        "s0)",
        "min()",
        "min",
        "s0.real",
        "__import__('os')",
        "s0 ** 9",
        "[1]",
        "s0 if s1 else 2",
        "lambda: 1",
        "9" * 30,
        "(" * 300 + "1" + ")" * 300,
        "-" * 300 + "1",
        "+".join(["s0"] * 300),
        "s0 == s1",
        "1.5",
        True,
        None,
        1.5,
        1 << 70,
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SizeTextError):
        parse_size(text)


@pytest.mark.parametrize("text", ["s0", "s0 == ", "s0 = 1", "s0 == 1 == 2", "s0 and s1", "(s0 == 1)", 1])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(SizeTextError):
        parse_condition(text)


def test_symbols_are_named():
    assert parse_size("s1 * (s0 + 2) // min(s1, 4)").symbols == ("s0", "s1")
    assert parse_size("s0").symbol == "s0"
    assert parse_size("s0 + 1").symbol is None
    assert parse_size(5) == parse_size("5")
    assert (parse_size(5).fixed, parse_size("s0").fixed) == (5, None)


RANGES = {"s0": (2, 9), "s1": (1, 64), "u12": (0, None)}


@given(SIZES, st.integers(2, 9), st.integers(1, 64), st.integers(0, 1 << 50))
def test_no_value_lies_beyond_the_bounds(text, s0, s1, u12):
    size = parsed(parse_size, text)
    if size is None:
        return
    low, high = size.bounds(RANGES)
    value = outcome(lambda: size.evaluate({"s0": s0, "s1": s1, "u12": u12}))
    if value != "division by zero":
        assert low is None or low <= value
        assert high is None or value <= high


def test_bounds_of_what_sizes_look_like():
    for text, bounds in [
        ("s0 * s1", (2, 576)),
        ("(s0 + 3) // 4", (1, 3)),
        ("u12 + s0", (2, None)),
        ("s0 - 1", (1, 8)),
        ("max(1, u12)", (1, None)),
        ("u12 % 8", (0, 7)),
        ("-s0", (-9, -2)),
        ("7", (7, 7)),
    ]:
        assert parse_size(text).bounds(RANGES) == bounds
