"""How inputs lie in their storages, and what they hold."""

import pytest
import torch

from tests.fuzz import memory
from tests.fuzz.program import Call, Input, Program


def made(*inputs: Input, **sizes: int):
    return memory.make(Program(1, inputs, (), (), (Call(sizes),)), 0, ("argument",))


@pytest.mark.parametrize("layout", memory.LAYOUTS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_layouts(layout: str, rows: int):
    storages, tensors = made(Input("x", "argument", "float32", ("A", 4), layout, "normal"), A=rows)
    x, storage = tensors["x"], storages["x"]
    assert x.shape == (rows, 4) and x.isfinite().all()
    assert storage.memory[~storage.covered].isnan().all()
    assert (layout == "plain") == (len(storage.memory) == x.numel() and x.is_contiguous())


@pytest.mark.parametrize("how", ["same", "view", "shift"])
def test_aliases(how: str):
    one = Input("x", "argument", "int64", (4,), "guarded", "normal")
    _, tensors = made(one, Input("y", "argument", "int64", (4,), alias=("x", how)))
    x, y = tensors["x"], tensors["y"]
    y[0] = 77
    assert x[1 if how == "shift" else 0] == 77
    assert (x is y) == (how == "same")


def test_contents():
    def content(kind: str, dtype: torch.dtype, bound: int = 0) -> torch.Tensor:
        return memory.content(kind, dtype, 400, bound, ("a key",))

    assert {2**53, 2**31, 2**24, torch.iinfo(torch.int64).min} <= {*content("limits", torch.int64).tolist()}
    assert content("limits", torch.int8).min() == -128
    special = content("special", torch.float32)
    assert special.isnan().any() and (special == torch.inf).any() and special.isfinite().any()
    index = content("index", torch.int64, 7)
    assert int(index.min()) >= -7 and int(index.max()) == 6
    beyond = content("beyond", torch.int64, 7)
    assert int(beyond.max()) >= 7 or int(beyond.min()) < -7
    assert len({*content("slots", torch.int64, 500).tolist()}) == 400
    assert torch.equal(content("normal", torch.float32), content("normal", torch.float32))
