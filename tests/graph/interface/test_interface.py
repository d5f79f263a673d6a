"""The generated check: what fits a port is taken, copied where it may be; what does not is named."""

import pytest
import torch

from dlinfer.errors import ArtifactInputError
from dlinfer.graph.interface.interface import Interface, as_taken, mismatches
from dlinfer.graph.interface.ports import Port, bounds_of, shown
from dlinfer.graph.torch_private.expressions import parse_condition, parse_size

CPU = torch.device("cpu")
SYMBOLS = {"s0": (2, 64), "lambda_": (1, None)}


def port(name, *sizes, **kind):
    parsed = tuple(None if size is None else parse_size(size) for size in sizes)
    kind = {"dtype": torch.float32, "device": CPU} | kind
    return Port(name, sizes=parsed, bounds=bounds_of(parsed, SYMBOLS), **kind)


def number(name, size):
    return port(name, size, dtype=torch.int64, number=True)


def interface(*ports, conditions=(), **fields):
    return Interface(ports, symbols=SYMBOLS, conditions=tuple(map(parse_condition, conditions)), **fields)


BOTH = interface(
    port("x", "s0", 8),
    port("y", "2*s0", "lambda_", strides=None),
    number("n", "lambda_"),
    conditions=["s0 < 40", "lambda_ % s0 != 1"],
)


def test_what_fits_is_taken_with_the_values_of_the_symbols():
    x, y = torch.ones(4, 8), torch.ones(8, 3)
    values, symbols = BOTH.bind([x, y, 3])
    assert values[0] is x
    assert values[1] is y
    assert values[2] == 3
    assert dict(zip(BOTH.places, symbols, strict=True)) == {"s0": 4, "lambda_": 3}


@pytest.mark.parametrize(
    ("x", "y", "n", "said"),
    [
        (None, torch.ones(8, 3), 3, "'x'.* given None"),
        (torch.ones(4, 8).double(), torch.ones(8, 3), 3, "'x'.* given torch.float64"),
        (torch.ones(4, 8).to_sparse(), torch.ones(8, 3), 3, "'x'.* given a torch.sparse_coo tensor"),
        (torch.ones(4, 7), torch.ones(8, 3), 3, r"'x'.* given sizes \(4, 7\)"),
        (torch.ones(4, 8, 1), torch.ones(8, 3), 3, r"'x'.* given sizes \(4, 8, 1\)"),
        (torch.ones(1, 8), torch.ones(2, 3), 3, r"'x'.* \[2\.\.64, 8\].* given sizes \(1, 8\)"),
        (torch.ones(4, 8), torch.ones(9, 3), 3, r"expected y\.size\(\)\[0\] == 2\*x\.size\(\)\[0\], given 9, 4"),
        (torch.ones(4, 8), torch.ones(8, 3), 4, r"expected y\.size\(\)\[1\] == n, given 3, 4"),
        (torch.ones(4, 8), torch.ones(8, 3), 3.0, "'n'.* given 3.0"),
        (torch.ones(4, 8), torch.ones(8, 3), True, "'n'.* given True"),
        (torch.ones(40, 8), torch.ones(80, 3), 3, r"expected x\.size\(\)\[0\] < 40, given 40"),
        (torch.ones(4, 8), torch.ones(8, 5), 5, r"y\.size\(\)\[1\] % x\.size\(\)\[0\] != 1, given 5, 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(x, y, n, said):
    with pytest.raises(ArtifactInputError, match=said):
        BOTH.bind([x, y, n])


def test_a_tensor_that_may_be_copied_becomes_contiguous_and_resolved():
    (strided,), _ = interface(port("x", 3, 4)).bind([torch.ones(4, 3).t()])
    assert strided.is_contiguous()
    negated = torch.ones(4, dtype=torch.complex64).conj().imag
    (resolved,), _ = interface(port("x", 4)).bind([negated])
    assert not resolved.is_neg()
    assert torch.equal(resolved, negated)


@pytest.mark.parametrize("kind", ["written", "held"])
def test_a_tensor_that_must_not_be_copied_is_refused(kind):
    same = interface(port("x", 3, 4, **{kind: True}))
    with pytest.raises(ArtifactInputError, match=r"contiguous on cpu, given .* strides \(1, 3\)"):
        same.bind([torch.ones(4, 3).t()])
    with pytest.raises(ArtifactInputError, match="lazily conjugated or negated"):
        interface(port("x", 4, **{kind: True})).bind([torch.ones(4, dtype=torch.complex64).conj().imag])


def test_strides_of_a_port_are_never_changed():
    strided = interface(port("x", 3, 4, strides=(parse_size(1), parse_size(3))))
    x = torch.ones(4, 3).t()
    assert strided.bind([x])[0][0] is x
    with pytest.raises(ArtifactInputError, match=r"strides \(1, 3\)"):
        strided.bind([x.contiguous()])
    rows = interface(port("x", "s0", 4, strides=(parse_size(1), parse_size("s0"))))
    assert rows.bind([torch.ones(4, 7).t()])[0][0].shape == (7, 4)
    with pytest.raises(ArtifactInputError, match=r"strides \(1, s0\)"):
        rows.bind([torch.ones(4, 8).t()[:7]])


def test_constants_keep_their_place():
    both = interface(number("n", 3), number("m", "lambda_"), constants={1: None, 3: 0.5})
    assert both.bind(both.values_among([3, None, 9, 0.5]))[0] == [3, None, 9, 0.5]
    with pytest.raises(ArtifactInputError, match=r"'argument 3'.* expected 0.5, given 1"):
        both.values_among([3, None, 9, 1])
    with pytest.raises(ArtifactInputError, match=r"'n'.* given 4"):
        both.bind([4, 9])


def test_zeros_and_nan_as_constants():
    nan = float("nan")
    both = interface(constants={0: 0.0, 1: nan, 2: -0.0, 3: 0})
    assert both.values_among([0.0, nan, -0.0, 0]) == []
    for other in ([-0.0, nan, -0.0, 0], [0.0, 1.0, -0.0, 0], [0.0, nan, 0.0, 0], [0.0, nan, -0.0, False]):
        with pytest.raises(ArtifactInputError, match="expected"):
            both.values_among(other)


def test_a_division_by_zero_is_refused():
    with pytest.raises(ArtifactInputError, match="a guard can divide by, given 0"):
        interface(port("x", "s0"), conditions=["7 // (s0 - 4) < 9"]).bind([torch.ones(4)])


def test_the_parts_of_the_check_are_python():
    objects = {}
    text = list(mismatches(port("x", None, 8), "x", lambda value: objects.setdefault(id(value), "k")))
    assert "x.shape[1] != 8" in text
    assert not any("shape[0]" in line for line in text)
    assert as_taken(port("x", 8, dtype=torch.bool), "x") == "x.contiguous()"
    assert as_taken(port("x", 8), "x") == "x.resolve_conj().resolve_neg().contiguous()"
    assert as_taken(port("x", 8, held=True), "x") == "x"


def test_values_are_shown_by_kind():
    assert shown([1]) == "a list"
    assert shown(torch.ones(2, 3).t()) == "a torch.float32 tensor of sizes (3, 2), strides (1, 3), on cpu"
    assert "nested" in shown(torch.nested.nested_tensor([torch.ones(1)]))


@pytest.mark.parametrize("text", ["pow(s0, -0.5) == 0.25", "1 / sqrt(s0) == 0.25", "max(s0, 16) == 16"])
def test_a_condition_calls_functions(text):
    first = port("x", "s0")
    interface = Interface((first,), symbols={"s0": (1, None)}, conditions=(parse_condition(text),))
    assert interface.bind([torch.ones(16)])[1] == (16,)
    with pytest.raises(ArtifactInputError):
        interface.bind([torch.ones(17)])
