"""What counts as close, and how a difference is described."""

import pytest
import torch

from dlinfer.utils.closeness import difference

inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "wrong"),
    [
        ([1.0], [1.0], 0.0, None),
        ([nan, inf, -inf, -0.0], [nan, inf, -inf, 0.0], 0.0, None),
        ([1.0], [nan], 9.0, "the first is 1, expected nan"),
        ([nan], [1.0], 9.0, "the first is nan, expected 1"),
        ([inf], [-inf], 9.0, "the first is inf, expected -inf"),
        ([3e38], [inf], 9.0, "the first is 3e+38, expected inf"),
        ([1.001], [1.0], 0.001, None),
        ([1.01], [1.0], 0.001, "1 of 1 elements"),
        ([True, True], [True, False], 9.0, "the first is True, expected False"),
        ([2**24 + 1], [2**24], 9.0, f"the first is {2**24 + 1}, expected {2**24}"),
        ([1.0], [1.0, 2.0], 0.0, "float32[1], expected float32[2]"),
        ([1], [1.0], 0.0, "int64[1], expected float32[1]"),
    ],
)
def test_difference(actual, expected, tolerance, wrong):
    found = difference([torch.tensor(actual)], [torch.tensor(expected)], rtol=tolerance, atol=tolerance)
    assert found is None if wrong is None else wrong in str(found)


def test_expected_floats_may_be_in_float64_and_integers_may_not():
    half, wide = torch.tensor([1.0]).half(), torch.tensor([1.0]).double()
    assert difference([half], [wide], expected_is_wide=True) is None
    assert difference([half], [wide]) == "result 0 is float16[1], expected float64[1]"
    assert difference([torch.tensor([1])], [torch.tensor([1.0])], expected_is_wide=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_codes_may_be_steps_away(dtype):
    codes = torch.tensor([8, 16, 24], dtype=torch.uint8)
    one, two = ((codes + step).view(dtype) for step in (1, 2))
    assert difference([one], [codes.view(dtype)], code_steps=1, expected_is_wide=True) is None
    assert "3 of 3 elements" in str(
        difference([two], [codes.view(dtype)], code_steps=1, expected_is_wide=True)
    )
    assert difference([one], [codes.view(dtype)]) is not None


def test_the_first_element_that_is_wrong_is_named():
    expected = [torch.zeros(2, 2), torch.zeros(2, 2)]
    actual = [torch.zeros(2, 2), torch.tensor([[0.0, 1.0], [0.0, 2.0]])]
    assert difference(actual, expected) == "2 of 4 elements of result 1 are wrong; the first is 1, expected 0"
    assert difference(actual, expected[:1]) == "2 results, expected 1"
