"""Inputs and outputs of runs on disk, as text and as arrays."""

import numpy as np
import torch
from torch import nn

import dlinfer
from tests.runtime.artifact.artifact_files import rows, same, saved


def test_runs_are_dumped_as_text(session, tmp_path):
    session.io_txt_dump(tmp_path / "logs" / "io.txt")
    session.run({"x": rows(2)})
    session.run({"x": rows(1).numpy()})
    session.io_txt_dump(None)
    session.run({"x": rows(3)})
    lines = (tmp_path / "logs" / "io.txt").read_text().splitlines()
    heads = [line for line in lines if line.startswith(("run", "input", "output"))]
    assert heads == [
        "run 0 of forward",
        "input x: float32 [2, 8]",
        "output logits: float32 [2, 4]",
        "output best: int64 [2]",
        "run 1 of forward",
        "input x: float32 [1, 8]",
        "output logits: float32 [1, 4]",
        "output best: int64 [1]",
    ]
    body = "".join(lines[2:4]).replace("[", " ").replace("]", " ").split()
    same(torch.tensor([float(one) for one in body]).reshape(2, 8), rows(2))


def test_runs_are_dumped_as_arrays(tmp_path):
    """bfloat16, which numpy lacks, is written as float32 under its name."""
    linear = nn.Linear(4, 3).to(torch.bfloat16).eval()
    x = torch.randn(2, 4).to(torch.bfloat16)
    session = dlinfer.load(saved(dlinfer.compile(linear, (x,)), tmp_path / "a.dlinfer"))
    session.io_bin_dump(tmp_path / "io")
    found = session.run({"input": x})["output"]
    names = sorted(path.name for path in (tmp_path / "io").iterdir())
    assert names == ["000000_forward_input_input.bfloat16.npy", "000000_forward_output_output.bfloat16.npy"]
    kept = torch.from_numpy(np.load(tmp_path / "io" / names[1])).to(torch.bfloat16)
    assert kept.equal(found)
