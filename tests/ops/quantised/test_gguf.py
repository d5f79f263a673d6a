"""GGUF's blocks in torch have the bits that llama.cpp's own package reads in them, whatever bytes they are of."""

import gguf as oracle
import numpy as np
import pytest
import torch
from torch import Tensor

from dlinfer.errors import OpArgumentError
from dlinfer.ops.core.checks import Rules
from dlinfer.ops.quantised import gguf

ROWS, COLUMNS = 7, 768


def random_bytes(kind: gguf.BlockType, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    rng = np.random.default_rng(kind.nbytes)
    return rng.integers(0, 256, (rows, kind.row_bytes(columns)), dtype=np.uint8)


def read_by_package(stored: np.ndarray, number: int) -> np.ndarray:
    plain = {0: np.float32, 1: np.float16}
    with np.errstate(all="ignore"):
        return oracle.dequantize(
            stored.view(plain.get(number, np.uint8)), oracle.GGMLQuantizationType(number)
        )


def assert_same_bits(got: Tensor, want: np.ndarray) -> None:
    nan = np.isnan(want)
    np.testing.assert_array_equal(got.isnan().numpy(), nan)
    np.testing.assert_array_equal(got.numpy().view(np.int32)[~nan], want.view(np.int32)[~nan])


def test_types_have_the_packages_names_and_sizes() -> None:
    for number, kind in gguf.TYPES.items():
        of_package = oracle.GGMLQuantizationType(number)
        assert (kind.name, (kind.numbers, kind.nbytes)) == (
            of_package.name,
            oracle.GGML_QUANT_SIZES[of_package],
        )


@pytest.mark.parametrize("number", gguf.TYPES, ids=lambda number: gguf.TYPES[number].name)
def test_any_bytes_are_read_as_by_the_package(number: int) -> None:
    kind = gguf.TYPES[number]
    stored = random_bytes(kind)
    got = gguf.values(kind, torch.from_numpy(stored), torch.float32)
    assert_same_bits(got, read_by_package(stored, number))


@pytest.mark.parametrize("number", gguf.TYPES, ids=lambda number: gguf.TYPES[number].name)
def test_a_single_block_at_an_odd_address(number: int) -> None:
    kind = gguf.TYPES[number]
    stored = random_bytes(kind, 1, kind.numbers)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.from_numpy(stored.ravel())])[1:]
    got = gguf.unpack(shifted, [number], [1], kind.numbers, torch.float32)
    assert_same_bits(got, read_by_package(stored, number))


def test_matrices_lie_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_AT_A_TIME", 2 * COLUMNS)  # in several pieces
    numbers, rows = [12, 8, 14], [5, 3, 4]
    stored = [random_bytes(gguf.TYPES[number], count) for number, count in zip(numbers, rows, strict=True)]
    packed = torch.cat([torch.from_numpy(part.ravel()) for part in stored])
    want = np.concatenate(
        [read_by_package(part, number) for part, number in zip(stored, numbers, strict=True)]
    )
    assert_same_bits(gguf.unpack(packed, numbers, rows, COLUMNS, torch.float32), want)
    rounded = gguf.unpack(packed, numbers, rows, COLUMNS, torch.bfloat16)
    wide = torch.from_numpy(want)
    torch.testing.assert_close(rounded, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"packed": torch.zeros(72, dtype=torch.int8)}, "packed"),
        ({"packed": torch.zeros(144, dtype=torch.uint8)[::2]}, "packed"),
        ({"packed": torch.zeros(71, dtype=torch.uint8)}, "packed"),
        ({"types": [4]}, "types"),
        ({"rows": [4, 0]}, "rows"),
        ({"rows": [-4]}, "rows"),
        ({"columns": 33}, "packed"),
    ],
)
def test_refused(changes: dict, argument: str) -> None:
    call = {"packed": torch.zeros(72, dtype=torch.uint8), "types": [2], "rows": [4], "columns": 32}
    gguf.check_packed(Rules("linear_gguf"), "packed", **call)
    with pytest.raises(OpArgumentError) as caught:
        gguf.check_packed(Rules("linear_gguf"), "packed", **call | changes)
    assert caught.value.fields["argument"] == argument
