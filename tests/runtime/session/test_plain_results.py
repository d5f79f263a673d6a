"""Results that are no tensors, through a file: None, numbers, text, and containers of these and of tensors."""

import numpy
import pytest
import torch
from torch import nn
from torch.export import Dim

import dlinfer


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)  # (tensor, None)


class Nested(nn.Module):
    def forward(self, x):
        return {
            "pair": (x * 2 + 1, None),
            "list": [x.sum(0), [x.shape[0], 0.5, True]],
            "kind": "sums",
            "same": x + 0,
        }


def through_a_file(module, example, tmp_path, **kwargs):
    artifact = dlinfer.compile(module, (example,), **kwargs)
    artifact.save(tmp_path / "a.dlinfer")
    return artifact, dlinfer.load(tmp_path / "a.dlinfer")


def test_a_module_that_gives_a_tensor_and_none(tmp_path):
    module, x = Attending().eval(), torch.randn(1, 5, 8)
    artifact, session = through_a_file(module, x, tmp_path)
    expected, nothing = module(x)
    result = artifact(x)
    assert nothing is result[1] is None
    found = session.run({"x": x})
    assert list(found) == ["output_0"]
    for one in (result[0], found["output_0"]):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("io", ["caller", "owned"])
def test_nested_results_with_numbers_and_text(tmp_path, io):
    module, x = Nested(), torch.randn(4, 3)
    shapes = {"x": {0: Dim("rows", min=2, max=16)}}
    artifact, session = through_a_file(module, x, tmp_path, dynamic_shapes=shapes)
    session.update_backend_options(io=io)
    for rows in (4, 7):
        given = torch.randn(rows, 3)
        expected, result, found = module(given), artifact(given), session.run({"x": given})
        assert list(found) == ["pair_0", "list_0", "list_1_0", "list_1_1", "list_1_2", "kind", "same"]
        assert found["list_1_0"] == result["list"][1][0] == rows
        assert [found["list_1_1"], found["list_1_2"], found["kind"]] == [0.5, True, "sums"]
        assert (result["list"][1], result["kind"]) == (expected["list"][1], "sums")
        for one, other, eager in (
            (found["pair_0"], result["pair"][0], expected["pair"][0]),
            (found["list_0"], result["list"][0], expected["list"][0]),
            (found["same"], result["same"], expected["same"]),
        ):
            torch.testing.assert_close(one, eager)
            torch.testing.assert_close(other, eager)
    assert isinstance(session.run({"x": numpy.ones((2, 3), numpy.float32)})["pair_0"], numpy.ndarray)


def test_numbers_in_a_dump(tmp_path):
    _, session = through_a_file(Nested(), torch.randn(4, 3), tmp_path)
    session.io_txt_dump(tmp_path / "dump.txt")
    session.io_bin_dump(tmp_path / "dump")
    session.run({"x": torch.randn(4, 3)})
    assert "output list_1_1: float64 []" in (tmp_path / "dump.txt").read_text()
    assert (tmp_path / "dump" / "000000_forward_output_list_1_0.npy").exists()
