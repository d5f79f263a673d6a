"""Sessions: an artifact by the names of its inputs and outputs."""

import io
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import dlinfer
from dlinfer.errors import ArtifactInputError, GraphRunError, SessionCallError
from tests.runtime.artifact.artifact_files import (
    Head,
    Keeps,
    Stub,
    compiled_head,
    rows,
    same,
    saved,
    use_stub,
    wanted,
)

# --- running


def test_torch_gives_torch_and_numpy_gives_numpy(session):
    found = session.run({"x": rows(3)})
    assert all(isinstance(one, torch.Tensor) for one in found.values())
    same(found, wanted(3))
    arrays = session.run({"x": rows(3).numpy()})
    assert all(isinstance(one, np.ndarray) for one in arrays.values())
    same({name: torch.from_numpy(one) for name, one in arrays.items()}, wanted(3))


def test_an_input_lies_where_the_caller_has_it(monkeypatch, tmp_path):
    """No copy on the way in: the engine sees the caller's memory, torch's and numpy's."""
    seen = []

    class Spy(Stub):
        def resolve(self, callee):
            function = super().resolve(callee)

            def spied(*args):
                seen.extend(one.data_ptr() for one in args if isinstance(one, torch.Tensor))
                return function(*args)

            return spied

    use_stub(monkeypatch, Spy())
    path = saved(compiled_head(options={"small_regions": "engine"})[1], tmp_path / "a.dlinfer")
    session = dlinfer.load(path)
    x = rows(4)
    session.run({"x": x})
    assert x.data_ptr() in seen
    array = rows(4).numpy()
    session.run({"x": array})
    assert array.ctypes.data in seen


def test_strided_and_read_only_inputs_are_taken(session):
    wide = torch.randn(3, 16)
    same(session.run({"x": wide[:, ::2]}), Head().eval()(wide[:, ::2]))
    array = rows(3).numpy()
    array.flags.writeable = False
    same(torch.from_numpy(session.run({"x": array})["logits"]), wanted(3)["logits"])
    same(torch.from_numpy(session.run({"x": rows(3).numpy()[::-1]})["best"]), wanted(3)["best"].flip(0))


def test_outputs_that_the_caller_gives_are_written(session):
    logits, best = torch.empty(3, 4), np.empty(3, dtype=np.int64)
    found = session.run({"x": rows(3)}, outputs={"logits": logits, "best": best})
    assert found["logits"] is logits
    assert found["best"] is best
    same(logits, wanted(3)["logits"])
    same(torch.from_numpy(best), wanted(3)["best"])


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({}, "'x': no value was passed"),
        ({"x": rows(3), "y": rows(3)}, "'y': the inputs are x"),
        ({"y": rows(3)}, "'x': no value was passed"),
    ],
)
def test_names_it_does_not_have(session, inputs, said):
    with pytest.raises(SessionCallError, match=said):
        session.run(inputs)


@pytest.mark.parametrize(
    "value",
    [
        rows(3).double(),
        rows(3).to(torch.int64),
        rows(17),
        rows(3)[:, :7],
        rows(3)[0],
        torch.empty(0, 8),
        rows(3).to("meta"),
        rows(3).numpy().astype(np.float64),
        np.array(["a"]),
        [[1.0] * 8],
        None,
        3,
        3.5,
        "x",
        object(),
        io.BytesIO(b"1"),
        memoryview(b"12345678"),
        np.float32(1),
        rows(3).numpy().astype(">f4"),
        np.ma.masked_array(rows(3).numpy(), mask=True),
        np.array([object()]),
        np.zeros(3, dtype=[("a", "f4")]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        rows(3).to_sparse(),
        rows(3).to_sparse_csr(),
        rows(3).to_mkldnn(),
        torch.quantize_per_tensor(rows(3), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([rows(3)[0], rows(3)[1]]),
        torch.nested.nested_tensor([rows(3)[0], rows(3)[1]], layout=torch.jagged),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_do_not_fit(session, value):
    with pytest.raises(ArtifactInputError, match="'x'"):
        session.run({"x": value})
    same(session.run({"x": rows(3)}), wanted(3))


def test_an_array_in_another_order_of_bytes_says_what_to_pass(session):
    array = rows(3).numpy().astype(">f4")
    with pytest.raises(ArtifactInputError, match="astype"):
        session.run({"x": array})
    same(session.run({"x": torch.from_numpy(array.astype(array.dtype.type))}), wanted(3))


@pytest.mark.parametrize(
    "inputs", [None, 3, [rows(3)], rows(3), "x", io.BytesIO()], ids=lambda value: type(value).__name__
)
def test_inputs_that_are_no_dict(session, inputs):
    with pytest.raises(ArtifactInputError, match="a dict of name to value"):
        session.run(inputs)
    with pytest.raises(ArtifactInputError, match="a dict of name to value"):
        session.profile_ops(inputs)


def test_values_that_do_not_fit_the_compiled_graph_itself():
    artifact = compiled_head()[1]
    for value in (rows(3).to_sparse(), rows(3).to_mkldnn(), None, io.BytesIO(), rows(3).numpy()):
        with pytest.raises(ArtifactInputError):
            artifact(value)


@pytest.mark.parametrize(
    "target",
    [
        torch.empty(2, 4),
        torch.empty(3, 4, dtype=torch.float64),
        torch.empty(3, 4).to_sparse(),
        np.empty((3, 4), ">f4"),
        None,
        [1.0],
    ],
    ids=["sizes", "dtype", "sparse", "byte order", "none", "list"],
)
def test_outputs_that_do_not_fit(session, target):
    with pytest.raises(ArtifactInputError, match="'logits'"):
        session.run({"x": rows(3)}, outputs={"logits": target})
    with pytest.raises(SessionCallError, match="'lodgits'"):
        session.run({"x": rows(3)}, outputs={"lodgits": torch.empty(3, 4)})


def test_outputs_that_do_not_fit_are_noticed_before_a_cache_is_written(tmp_path):
    module = Keeps().eval()
    first, second = (rows(2), torch.tensor([0, 1])), (rows(2, seed=1), torch.tensor([2, 3]))
    wanted = Keeps().eval()
    wanted.load_state_dict(module.state_dict())
    session = dlinfer.load(saved(dlinfer.compile(module, first), tmp_path / "a.dlinfer"))
    name = session.get_output_name("forward", 0)
    with pytest.raises(ArtifactInputError, match=f"'{name}'"):
        session.run(dict(zip(("x", "slots"), first, strict=True)), outputs={name: torch.empty(9)})
    found = session.run(dict(zip(("x", "slots"), second, strict=True)))
    with torch.no_grad():
        same(found[name], wanted(*second))


def test_a_parameter_called_like_a_word_of_python(tmp_path):
    """torch.export calls it input_1; the module's user calls it input."""

    class Words(nn.Module):
        def forward(self, input, id, input_id):
            return input + id * input_id

    artifact = dlinfer.compile(Words().eval(), (rows(2), rows(2), rows(2)))
    session = dlinfer.load(saved(artifact, tmp_path / "a.dlinfer"))
    assert list(session.model_input_shape_dict()) == ["input", "id", "input_id"]
    same(
        session.run({"input": rows(2), "id": rows(2), "input_id": rows(2)})["output"], rows(2) + rows(2) ** 2
    )
    with pytest.raises(ArtifactInputError, match="'id'"):
        artifact(rows(2), rows(3), rows(2))


def test_process_by_indexes(session):
    """0 where it went well, 1 where not, and last_error says why."""
    logits, best = torch.empty(3, 4), torch.empty(3, dtype=torch.int64)
    assert session.process("forward", {0: rows(3)}, {0: logits, 1: best}) == 0
    same({"logits": logits, "best": best}, wanted(3))
    assert session.last_error is None
    for inputs, outputs in (
        ({0: rows(17)}, {0: logits}),
        ({1: rows(3)}, {0: logits}),
        ({0: rows(3)}, {5: logits}),
    ):
        assert session.process("forward", inputs, outputs) == 1
        assert str(session.last_error)
    assert session.process("backward", {0: rows(3)}, {0: logits}) == 1
    assert "the entries are forward" in str(session.last_error)


def test_an_engine_that_fails_leaves_a_session_that_runs(monkeypatch, tmp_path):
    broken = threading.Event()

    class Fails(Stub):
        def resolve(self, callee):
            function = super().resolve(callee)

            def failing(*args):
                if broken.is_set():
                    raise RuntimeError("out of luck")
                return function(*args)

            return failing

    use_stub(monkeypatch, Fails())
    session = dlinfer.load(
        saved(compiled_head(options={"small_regions": "engine"})[1], tmp_path / "a.dlinfer")
    )
    same(session.run({"x": rows(3)}), wanted(3))
    broken.set()
    with pytest.raises(GraphRunError, match="out of luck"):
        session.run({"x": rows(3)})
    broken.clear()
    same(session.run({"x": rows(3)}), wanted(3))


# --- entries and stages


def test_the_first_stage_that_fits_runs(tmp_path):
    """Stages are shape profiles of one entry."""
    head = Head().eval()
    small = dlinfer.compile(head, (rows(3),), dynamic_shapes={"x": {0: Dim("few", min=1, max=4)}})
    large = dlinfer.compile(head, (rows(9),), dynamic_shapes={"x": {0: Dim("many", min=5, max=64)}})
    session = dlinfer.load(saved(dlinfer.bundle({"head": [small, large]}), tmp_path / "a.dlinfer"))
    assert session.get_stage_num("head") == 2
    assert session.get_input_shape("head", 0, 0) == [4, 8]
    assert session.get_input_shape("head", 0, 1) == [64, 8]
    assert session.get_input_max_shape("head", 0) == [64, 8]
    for count in (1, 4, 5, 64):
        same(session.run({"x": rows(count)}), head(rows(count)))
    with pytest.raises(ArtifactInputError, match=r"5\.\.64"):
        session.run({"x": rows(65)})


def test_entries_share_a_cache_that_they_write(tmp_path):
    """Prefill and decode of one module see one cache."""
    module = Keeps().eval()
    several = dlinfer.compile(module, (rows(4), torch.arange(4)))
    one = dlinfer.compile(module, (rows(1), torch.tensor([4])))
    path = saved(dlinfer.bundle({"prefill": several, "decode": one}), tmp_path / "a.dlinfer")
    fresh = Keeps().eval()
    fresh.load_state_dict(module.state_dict())
    session = dlinfer.load(path)
    with torch.no_grad():
        for entry, x, slots in (
            ("prefill", rows(4), torch.arange(4)),
            ("decode", rows(1, 1), torch.tensor([4])),
            ("decode", rows(1, 2), torch.tensor([5])),
        ):
            [found] = session.run({"x": x, "slots": slots}, entry).values()
            same(found, fresh(x, slots))
    with pytest.raises(SessionCallError, match="the entries are prefill, decode"):
        session.run({"x": rows(4), "slots": torch.arange(4)})


class Whole(nn.Module):
    """Writes a buffer."""

    base: torch.Tensor

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("base", base)

    def forward(self, x):
        self.base.copy_(x)
        return x + 1


class Row(nn.Module):
    """Reads a buffer, which may be a view of another module's."""

    row: torch.Tensor

    def __init__(self, row: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("row", row)

    def forward(self, x):
        return x + self.row


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[0],
        lambda base: base[2],
        lambda base: base[:, 1],
        lambda base: base.t()[3],
        lambda base: base.view(torch.int32)[1],
        lambda base: base.view(torch.int16)[1, 1:4:2],
    ],
)
def test_entries_share_a_buffer_of_which_one_has_a_view(tmp_path, view):
    base = torch.zeros(3, 4)
    prefill, decode = Whole(base).eval(), Row(view(base)).eval()
    x = torch.zeros_like(decode.row)
    both = {"prefill": dlinfer.compile(prefill, (torch.ones(3, 4),)), "decode": dlinfer.compile(decode, (x,))}
    path = saved(dlinfer.bundle(both), tmp_path / "a.dlinfer")
    given = torch.arange(12.0).view(3, 4) + 7
    with dlinfer.load(path) as session:
        for scale in (1, 2):
            session.run({"x": given * scale}, "prefill")
            both["prefill"](given * scale)
            [found] = session.run({"x": x}, "decode").values()
            assert torch.equal(found, both["decode"](x))
            assert torch.equal(found, view(given * scale))
        session.reset()
        [found] = session.run({"x": x}, "decode").values()
        assert torch.equal(found, x), "buffers are as they were saved"


def test_one_entry_writes_a_buffer_and_reads_a_view_of_it(tmp_path):
    class Both(Whole):
        def __init__(self) -> None:
            super().__init__(torch.zeros(3, 4))
            self.row: torch.Tensor
            self.register_buffer("row", self.base[1])

        def forward(self, x):
            before = self.row * 2
            self.base.copy_(x)
            return before + self.row

    module, expected = Both().eval(), Both().eval()
    artifact = dlinfer.compile(module, (torch.ones(3, 4),))
    with dlinfer.load(saved(artifact, tmp_path / "a.dlinfer")) as session:
        for scale in (1, 2, 3):
            x = torch.arange(12.0).view(3, 4) * scale
            [found] = session.run({"x": x}).values()
            with torch.no_grad():
                wanted = expected(x)
            assert torch.equal(found, wanted)
            assert torch.equal(artifact(x), wanted)


def test_a_buffer_whose_elements_share_memory_is_written(tmp_path):
    class Keeps(nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1).expand(3))

        def forward(self, x):
            self.seen[:1].copy_(x[:1])
            return self.seen + x

    module, expected = Keeps().eval(), Keeps().eval()
    x = torch.arange(3.0) + 1
    with dlinfer.load(saved(dlinfer.compile(module, (x,)), tmp_path / "a.dlinfer")) as session:
        [found] = session.run({"x": x}).values()
    with torch.no_grad():
        assert torch.equal(found, expected(x))


# --- introspection


def test_what_goes_in_and_comes_out(session, owned):
    assert session.get_device_ids() == [0]
    assert session.get_graph_names() == ["forward"]
    assert (session.get_addr_mode("forward"), owned.get_addr_mode("forward")) == (0, 1)
    assert (session.get_input_num("forward"), session.get_output_num("forward")) == (1, 2)
    assert session.get_is_dynamic("forward") is True
    assert session.get_input_name("forward", 0) == "x"
    assert [session.get_output_name("forward", index) for index in (0, 1)] == ["logits", "best"]
    assert session.get_input_tensor_devid("forward", 0) == 0
    assert session.get_output_tensor_devid("forward", 1) == 0
    assert session.get_input_shape("forward", 0) == [16, 8]
    assert session.get_output_shape("forward", 0) == [16, 4]
    assert session.get_output_max_shape("forward", 1) == [16]
    assert session.get_input_dtype("forward", 0) is torch.float32
    assert session.get_output_dtype("forward", 1) is torch.int64
    assert session.get_input_scale("forward", 0) == session.get_output_scale("forward", 0) == 1.0
    assert session.model_input_shape_dict() == {"x": ([16, 8], "float32")}
    assert session.model_output_shape_dict() == {"logits": ([16, 4], "float32"), "best": ([16], "int64")}
    assert session.signature().outputs[0].shape == ("s0", 4)


def test_an_open_size_is_minus_one(tmp_path):
    head = Head().eval()
    artifact = dlinfer.compile(head, (rows(3),), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
    session = dlinfer.load(saved(artifact, tmp_path / "a.dlinfer"))
    assert session.get_input_shape("forward", 0) == [-1, 8]
    with pytest.raises(SessionCallError, match="max"):
        session.get_input_tensors_addrmode0("forward")


@pytest.mark.parametrize("index", [-1, 1, None, "x"])
def test_indexes_it_does_not_have(session, index):
    with pytest.raises(SessionCallError, match="has 1"):
        session.get_input_name("forward", index)
    with pytest.raises(SessionCallError, match="has 1"):
        session.signature("forward", index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_inputs_with_the_neg_bit_are_resolved_for_every_dtype(dtype, tmp_path):
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch._neg_view(torch.arange(1, 5).to(dtype))
    artifact = dlinfer.compile(Twice().eval(), (), {"x": x.clone()})
    assert torch.equal(artifact(x=x), x * 2)
    artifact.save(tmp_path / "twice.dlinfer")
    (result,) = dlinfer.load(tmp_path / "twice.dlinfer").run({"x": x}).values()
    assert torch.equal(result, x * 2)
