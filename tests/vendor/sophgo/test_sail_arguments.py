"""Every public call of sail with arguments of any kind: a result or an error of ours, and the engine goes on working.

Arguments that are too few or too many are Python's own TypeError where a call has one form.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dlinfer import settings
from dlinfer.errors import DlinferError
from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.sail import BmrtFlag, Dtype
from dlinfer.vendor.sophgo.sail.arrays import decoded
from tests.vendor.sophgo.conftest import relative
from tests.vendor.sophgo.test_sail_engine import FLOAT16, own_tensors, run

# Of every kind; the functions make what must be new each time.
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**70, 10**400, 0.5, -1.0, float("nan"), float("inf"), 1j),
    *("", "a", "1", "mlp", "x", "none/none", "a\0b", "\udc80", b"", b"a", bytearray(b"a"), memoryview(b"ab")),
    *([], [0], [1, 8, 16], [-1], [1.5], ["1"], [None], [[1]], [2**62, 2**62], (1,), {}, {0: 1}, {"a": []}, set(), {1}),
    *(object(), type, len, range(3), slice(1), Ellipsis, Dtype.BM_INT8, BmrtFlag.BM_RUNTIME_SHARE_MEM),
    *(np.float32(2), np.float64("nan"), np.int64(1), np.uint8(3), np.bool_(True), np.array(1), np.array([])),
    *(np.zeros(3), np.zeros((1, 8, 16), np.float16), np.array(["a"]), np.array([None]), np.array([1, 2])),
    *(np.zeros((1,) * 9, np.float32), np.zeros(2, [("a", "i4")]), np.zeros(2, ">f4"), np.array([2**63], np.uint64)),
    *(np.array([np.nan, np.inf, 1e30], np.float32), np.zeros(3, np.complex64), np.array("2020", "M8")),
]  # fmt: skip
ENGINE = sorted(name for name in vars(sail.EngineLLM) if not name.startswith("_") and name != "last_error")
TENSOR = sorted(name for name in vars(sail.Tensor) if not name.startswith("_") and name != "on")
FIRST = {"get_input_tensors": 3, "get_output_tensors": 3, "sync_s2d": 4, "sync_d2s": 4}  # those of *args


def how_many(function: Callable[..., Any], name: str) -> tuple[int, int]:
    """The least and most arguments that a call takes."""
    kinds = inspect.signature(function).parameters.values()
    plain = [each for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    least = sum(each.default is each.empty for each in plain)
    return least, FIRST.get(name, len(plain))


def only_ours(function: Callable[..., Any], *arguments: Any) -> None:
    """Call it: what comes out is a result or an error of ours, without a warning of anybody's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            function(*arguments)
        except DlinferError as error:
            assert str(error)


@pytest.fixture
def chip(open_chips, tmp_path, monkeypatch):
    """A device of bm1684x; files of odd names are made in a folder of this test's own."""
    monkeypatch.chdir(tmp_path)
    with settings.override(sophgo_emulate="bm1684x"):
        yield open_chips["bm1684x"]


ANY_ARGUMENTS = hypothesis_settings(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
)


def test_calls_of_an_engine(llm):
    """One odd argument at each place, then odd ones everywhere."""
    for name in ENGINE:
        call = getattr(llm, name)
        least, most = how_many(call, name)
        for place in range(most):
            for odd in ODD:
                given_ = ["mlp", 0, 0][:most]
                given_[place] = odd
                only_ours(call, *given_[: max(least, place + 1)])
        for odd in ODD:
            only_ours(call, *[odd] * most)
    assert relative(*run(llm, "mlp")) < FLOAT16


def test_process(llm, chip):
    """Mappings of anything to anything; it raises nothing at all."""
    inputs, outputs = own_tensors(llm, "mlp")
    values = st.sampled_from([*inputs.values(), *outputs.values(), *ODD])
    keys = st.sampled_from([0, 1, 2, -1, "0", 0.0, True, None, np.int64(1)])
    tensors = st.one_of(st.dictionaries(keys, values, max_size=3), st.sampled_from(ODD))

    @ANY_ARGUMENTS
    @given(st.sampled_from(["mlp", "head", *ODD]), tensors, tensors)
    def of_anything(graph, given_inputs, given_outputs):
        assert type(llm.process(graph, given_inputs, given_outputs)) is int

    of_anything()
    assert llm.process("mlp", inputs, outputs) == 0


@pytest.mark.parametrize(
    ("dtype", "memory"),
    [
        (Dtype.BM_INT8, (True, True)),
        (Dtype.BM_FLOAT16, (False, True)),
        (Dtype.BM_BFLOAT16, (True, False)),
        (Dtype.BM_FLOAT32, (False, False)),
    ],
)
def test_calls_of_a_tensor(chip, dtype, memory):
    tensor, other = (sail.Tensor(sail.Handle(0), [1, 3], dtype, *memory) for _ in range(2))
    for name in TENSOR:
        least, most = how_many(getattr(tensor, name), name)
        usual = [other, 0, 0, 1] if name.startswith("sync") else [np.ones((1, 3), np.float32), 1.0]
        if not most:
            only_ours(getattr(tensor, name))
        for place in range(most):
            for odd in ODD:
                given_ = usual[:most]
                given_[place] = odd
                only_ours(getattr(tensor, name), *given_[: max(least, place + 1)])
    sail.Tensor(sail.Handle(0), [1], dtype, False, True).zeros()  # the worker lives


def test_constructors(llm, chip):
    """Of tensors and engines, by place and by name."""
    tensor = sail.Tensor(sail.Handle(0), [4], Dtype.BM_INT8, True, True)
    names = ["handle", "src", "data", "shape", "dtype", "own_sys_data", "own_dev_data", "offset"]
    names += ["bmodel_path", "bmodel_bytes", "bmodel_size", "flags", "dev_ids", "tpu_id"]
    odd = st.sampled_from(ODD)

    @ANY_ARGUMENTS
    @given(
        st.sampled_from([sail.Handle(0), tensor, *ODD]),
        st.lists(odd, max_size=4),
        st.dictionaries(st.sampled_from(names), odd, max_size=2),
    )
    def of_anything(first, places, named):
        only_ours(lambda: sail.Tensor(*[first, *places], **named))
        only_ours(lambda: sail.EngineLLM(*places, **named))

    of_anything()
    tensor.ones()


@pytest.mark.parametrize("kind", [sail.Handle, Dtype, BmrtFlag])
def test_handles_and_enumerations(chip, kind):
    for odd in ODD:
        if kind is sail.Handle or not isinstance(
            odd, np.ndarray
        ):  # which Python's enum itself compares, and fails
            only_ours(kind, odd)


def test_forms_of_tensors(chip, llm):
    """One odd argument at each place of each form."""
    source = sail.Tensor(sail.Handle(0), [4], Dtype.BM_INT8, True, True)
    for usual in (
        [sail.Handle(0), np.ones(3, np.float32), True, True],
        [sail.Handle(0), [1, 3], Dtype.BM_INT8, True, True],
        [source, [2], 1],
    ):
        for place in range(len(usual)):
            for odd in ODD:
                arguments: list[Any] = [*usual]
                arguments[place] = odd
                only_ours(sail.Tensor, *arguments)
    source.ones()


def test_forms_of_engines(chip, bmodel):
    path = str(bmodel("bm1684x"))
    data = bmodel("bm1684x").read_bytes()
    taken = 0
    for usual in ([path, [0]], [path, 1, [0]], [data, len(data), [0]]):
        for place in range(len(usual)):
            for odd in ODD:
                arguments: list[Any] = [*usual]
                arguments[place] = odd
                if isinstance(odd, (int, np.integer)) and place == 1 and isinstance(usual[0], str):
                    continue  # flags of any bits are BMRuntime's affair
                if odd in ([0], (1,)) if isinstance(odd, (list, tuple)) else isinstance(odd, range):
                    taken += 1
                    continue
                only_ours(sail.EngineLLM, *arguments)
    assert taken


# --- what some of them must say


@pytest.mark.parametrize("call", ["memory_set", "scale_to"])
@pytest.mark.parametrize("number", ["a", None, True, 1j, [1], np.array([1, 2]), 10**400])
def test_what_is_no_number_is_refused(chip, call, number):
    tensor = sail.Tensor(sail.Handle(0), np.arange(3, dtype=np.float32))
    with pytest.raises(SophgoCallError, match=rf"Tensor\.{call}: .* is not a number"):
        getattr(tensor, call)(number)
    assert (tensor.asnumpy() == np.arange(3)).all()


@pytest.mark.parametrize(
    ("number", "dtype"),
    [
        *((300, Dtype.BM_INT8), (-1, Dtype.BM_UINT32), (2**32, Dtype.BM_UINT32), (-32769.5, Dtype.BM_INT16)),
        *((7e4, Dtype.BM_FLOAT16), (1e39, Dtype.BM_FLOAT32), (3.4e38, Dtype.BM_BFLOAT16)),
    ],
)
def test_memory_set_of_a_number_that_the_type_has_not(chip, number, dtype):
    tensor = sail.Tensor(sail.Handle(0), [3], dtype, True, True)
    with pytest.raises(
        SophgoCallError, match=f"{number!r} is beyond the range of {dtype.name}".replace("+", r"\+")
    ):
        tensor.memory_set(number)
    assert (tensor.asnumpy() == 0).all()


@pytest.mark.parametrize(("number", "kept"), [(2.9, 2), (-2.9, -2), (127.9, 127), (-128.5, -128)])
def test_memory_set_of_integers_drops_the_fraction(chip, number, kept):
    """As sophon-sail converts in C."""
    tensor = sail.Tensor(sail.Handle(0), [2], Dtype.BM_INT8, True, False)
    tensor.memory_set(number)
    assert (tensor.asnumpy() == kept).all()


@pytest.mark.parametrize("dtype", [Dtype.BM_FLOAT32, Dtype.BM_FLOAT16, Dtype.BM_BFLOAT16])
@pytest.mark.parametrize("number", [float("-inf"), float("inf"), float("nan")])
def test_memory_set_of_what_floating_point_has_beside_numbers(chip, dtype, number):
    """A mask is often minus infinity."""
    tensor = sail.Tensor(sail.Handle(0), [3], dtype, False, True)
    tensor.memory_set(number)
    assert np.array_equal(decoded(tensor.asnumpy(), dtype), np.full(3, number, np.float32), equal_nan=True)


def test_not_a_number_is_no_integer(chip):
    tensor = sail.Tensor(sail.Handle(0), [2], Dtype.BM_INT8, True, True)
    with pytest.raises(SophgoCallError, match="a tensor of BM_INT8 cannot hold NaN"):
        tensor.scale_from(np.array([np.nan, 1], np.float32), 1.0)
    tensor.scale_from(np.array([np.inf, -np.inf], np.float32), 1.0)
    assert (tensor.asnumpy() == [127, -128]).all()


def whole_number(number: int) -> Any:
    """One of numpy's."""
    return np.int64(number)


def test_whole_numbers_of_numpy_are_taken(chip, llm):
    """Sizes, offsets, indices, devices: they go to the worker as numbers of JSON."""
    none, one, two, five = (whole_number(number) for number in (0, 1, 2, 5))
    shape: Any = np.array([2])
    handle = sail.Handle(none)
    whole = sail.Tensor(handle, np.arange(6, dtype=np.int32), False, True)
    part = sail.Tensor(whole, shape, one)
    assert (part.asnumpy([two]) == part.asnumpy(shape)).all()
    assert (part.asnumpy() == [1, 2]).all()
    part.update_data(np.array([7, 8], np.int32))
    part.sync_d2d(whole, five, one, one)
    assert (whole.asnumpy() == [0, 7, 5, 3, 4, 5]).all()
    assert llm.get_input_name("mlp", one) == "bias"
    assert llm.get_input_shape("mlp", none, one) == [1, 16, 16]


@pytest.mark.parametrize("shape", ["12", b"12", [1.5], [True], {1: 2}, {1, 2}, None, [[1]]])
def test_what_is_no_shape_is_refused(chip, shape):
    with pytest.raises(SophgoCallError, match="is not a shape"):
        sail.Tensor(sail.Handle(0), shape, Dtype.BM_INT8, True, True)


def test_more_sizes_than_a_chip_takes(chip):
    with pytest.raises(SophgoCallError, match="1 to 8 sizes"):
        sail.Tensor(sail.Handle(0), np.zeros((1,) * 9, np.float32))


def test_more_bytes_than_a_tensor_has_are_refused_also_without_a_device(chip):
    for shape, dtype in (([2**62], Dtype.BM_INT8), ([2**32], Dtype.BM_INT8), ([2**30], Dtype.BM_FLOAT32)):
        with pytest.raises(SophgoCallError, match="at most 4294967295"):
            sail.Tensor(sail.Handle(0), shape, dtype, True, False)


def test_a_bmodel_by_a_name_that_is_no_text(bmodel, chip, tmp_path):
    """Bytes of a path that are no UTF-8."""
    path = tmp_path / "m\udcff.bmodel"
    path.write_bytes(bmodel("bm1684x").read_bytes())
    assert relative(*run(sail.EngineLLM(str(path), [0]), "mlp")) < FLOAT16


def test_small_numbers_of_numpy_do_not_wrap(chip):
    """200 + 100 in uint8 is 44, which would be within the tensor."""
    number: Any = np.uint8
    source = sail.Tensor(sail.Handle(0), np.zeros(250, np.int8), True, True)
    target = sail.Tensor(sail.Handle(0), np.zeros(250, np.int8), True, True)
    for call in (target.sync_s2d, target.sync_d2s, target.sync_d2d):
        with pytest.raises(SophgoCallError, match="elements 200 to 300 of 250"):
            call(source, number(200), number(0), number(100))
    with pytest.raises(SophgoCallError, match="100 elements do not fit with stride 3 into 250"):
        target.sync_d2d_stride(source, number(3), number(1), number(100))
    with pytest.raises(SophgoCallError, match="from element"):
        sail.Tensor(source, [100], number(200))
    part = sail.Tensor(sail.Tensor(sail.Handle(0), [1000], Dtype.BM_INT8, False, True), [300], number(200))
    assert part.device_memory().place.offset == 200
    assert part.shape() == [300]
