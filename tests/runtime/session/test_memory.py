"""Where a session's tensors lie: inputs and outputs of its own, weights and memory that sessions share, their plan."""

import itertools
import json

import pytest
import torch
from torch.export import Dim

import dlinfer
from dlinfer.errors import SessionCallError
from dlinfer.runtime.session.session import Flags
from tests.runtime.artifact.artifact_files import ROWS, Head, rows, same, saved, wanted

# --- tensors of its own


def test_its_own_tensors_go_in_and_come_out_without_a_copy(owned):
    [x] = owned.get_input_tensors("forward").values()
    assert x is not None
    assert x.shape == (16, 8)
    assert owned.get_input_tensors("forward", "x")[0].data_ptr() == x.data_ptr()
    assert owned.get_input_tensor("forward", 0).data_ptr() == x.data_ptr()
    few = owned.io_tensor("forward", "x", (3, 8))
    assert few.data_ptr() == x.data_ptr()
    few.copy_(rows(3))
    found = owned.run({"x": few})
    same(found, wanted(3))
    assert found["logits"].data_ptr() == owned.get_output_tensor("forward", 0).data_ptr()
    assert found["best"].data_ptr() == owned.get_output_tensors("forward", "best")[1].data_ptr()


class Sum(torch.nn.Module):
    """Twice its input and 1."""

    def forward(self, x):
        return {"y": x * 2 + 1}


def two_entries(folder):
    """A file with the entries prefill and decode, decode with two stages, of up to 4 and 16 rows."""
    long, short = (
        dlinfer.compile(Sum().eval(), (torch.zeros(2, 8),), dynamic_shapes={"x": {0: Dim("rows", max=rows)}})
        for rows in (16, 4)
    )
    return saved(dlinfer.bundle({"prefill": long, "decode": [short, long]}), folder / "two.dlinfer")


def test_entries_and_stages_have_tensors_of_their_own(tmp_path):
    with dlinfer.load(two_entries(tmp_path), options={"io": "owned"}) as session:
        places = [("prefill", 0), ("decode", 0), ("decode", 1)]
        given = [session.get_input_tensor(entry, 0, stage) for entry, stage in places]
        for number, x in enumerate(given):
            x.fill_(number)
        for number, ((entry, _), x) in enumerate(zip(places, given, strict=True)):
            assert torch.equal(x, torch.full_like(x, number))
            assert torch.equal(session.run({"x": x}, entry)["y"], torch.full_like(x, 2 * number + 1))
        prefilled = session.run({"x": given[0]}, "prefill")["y"]
        session.run({"x": given[2]}, "decode")
        assert torch.equal(prefilled, torch.full((16, 8), 1.0)), "another entry's results lie elsewhere"
        tensors = [
            t
            for e, s in places
            for t in (session.get_input_tensor(e, 0, s), session.get_output_tensor(e, 0, s))
        ]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_an_open_size_takes_memory_from_its_own_stage_only(tmp_path):
    closed = dlinfer.compile(
        Sum().eval(), (torch.zeros(2, 8),), dynamic_shapes={"x": {0: Dim("rows", max=16)}}
    )
    open_ = dlinfer.compile(Sum().eval(), (torch.zeros(2, 8),), dynamic_shapes={"x": {0: Dim("rows")}})
    path = saved(dlinfer.bundle({"open": open_, "closed": closed}), tmp_path / "open.dlinfer")
    with dlinfer.load(path, options={"io": "owned"}) as session:
        with pytest.raises(SessionCallError, match="highest"):
            session.get_input_tensor("open", 0)
        x = session.get_input_tensor("closed", 0).fill_(3)
        assert torch.equal(session.run({"x": x}, "closed")["y"], torch.full_like(x, 7))


class Rows(torch.nn.Module):
    """Writes a buffer, and gives a result of an open size."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x, reset):
        self.calls.add_(1).mul_(reset)
        return {"calls": self.calls + 0, "x": x * 2}


def test_a_result_of_an_open_size_is_refused_before_a_buffer_is_written(tmp_path):
    x, ones = torch.zeros(2, 8), torch.ones(1)
    shapes = {"x": {0: Dim("rows")}, "reset": None}
    artifact = dlinfer.compile(Rows().eval(), (x, ones), dynamic_shapes=shapes)
    session = dlinfer.load(saved(artifact, tmp_path / "rows.dlinfer"), options={"io": "owned"})
    with pytest.raises(SessionCallError, match="highest"):
        session.run({"x": x, "reset": ones})
    session.update_backend_options(io="caller")
    assert session.run({"x": x, "reset": ones})["calls"] == 1


def test_mode_0_gives_its_own_tensors_only_by_the_call_that_says_so(session):
    assert session.get_input_tensors("forward") == {}
    assert session.get_output_tensors("forward") == {}
    with pytest.raises(SessionCallError, match="owned"):
        session.get_input_tensor("forward", 0)
    [x] = session.get_input_tensors_addrmode0("forward").values()
    x.copy_(rows(16))
    outputs = session.get_output_tensors_addrmode0("forward")
    assert session.process("forward", {0: x}, outputs) == 0
    same({"logits": outputs[0], "best": outputs[1]}, wanted(16))
    for shape in ((17, 8), (3, 9), (3,)):
        with pytest.raises(SessionCallError):
            session.io_tensor("forward", "x", shape)
    with pytest.raises(SessionCallError, match="'z'"):
        session.io_tensor("forward", "z", (1, 8))


# --- shared weights and memory


def weights_of(session):
    session.setup()
    return [one.data_ptr() for stages in session._running.values() for one in stages[0].weights]


def test_two_sessions_share_weights(path, tmp_path):
    first, second, third = dlinfer.load(path), dlinfer.load(path), dlinfer.load(path)
    second.share_weights_with(first)
    assert weights_of(first) == weights_of(second)
    assert not set(weights_of(third)) & set(weights_of(first))
    same(second.run({"x": rows(3)}), wanted(3))
    with pytest.raises(SessionCallError, match="reset"):
        second.share_weights_with(third)
    other = saved(dlinfer.compile(Head(1).eval(), (rows(2),)), tmp_path / "other.dlinfer")
    with pytest.raises(SessionCallError, match="other weights"):
        dlinfer.load(other).share_weights_with(first)


def test_two_sessions_share_runtime_memory(path):
    options = {"io": "owned"}
    first, second = dlinfer.load(path, options=options), dlinfer.load(path, options=options)
    second.share_runtime_memory_with(first)
    both = [dlinfer.load(path, options=options, flags=Flags.SHARE_MEM) for _ in range(2)]
    for one, other in ((first, second), both):
        assert (
            one.get_input_tensor("forward", 0).data_ptr() == other.get_input_tensor("forward", 0).data_ptr()
        )
        same(one.run({"x": rows(3)}), wanted(3))
        same(other.run({"x": rows(4)}), wanted(4))
    with pytest.raises(SessionCallError, match="reset"):
        second.share_runtime_memory_with(first)
    for one in both:
        one.close()


def test_the_memory_plan_counts_every_value(owned, tmp_path):
    """At 16 rows, layer_norm gives 512 bytes, linear 256, argmax 128; sums of those that live at once."""
    owned.get_input_tensors("forward")
    plan = json.loads(owned.get_static_memory_alloc_info(tmp_path / "plan").read_text())
    [stage] = plan["entries"]["forward"]
    assert {one["name"]: one["bytes"] for one in stage["values"]} == {
        "layer_norm": 16 * 8 * 4,
        "linear": 16 * 4 * 4,
        "argmax": 16 * 8,
    }
    assert stage["peak_bytes"] == 16 * 8 * 4 + 16 * 4 * 4
    assert stage["weights_bytes"] == 4 * (8 + 8 + 32 + 4)
    assert stage["inputs"] == {"x": 512}
    assert stage["outputs"] == {"logits": 256, "best": 128}
    assert plan["runtime_memory_bytes"] == 512 + 256 + 128
    assert ROWS.max == 16
