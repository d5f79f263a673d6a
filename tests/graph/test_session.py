"""Sessions: an artifact by the names of its inputs and outputs."""

import json
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import dlinfer
from dlinfer.errors import (
    ArtifactInputError,
    CompileOptionError,
    GraphRunError,
    SessionCallError,
    SessionOptionError,
)
from dlinfer.graph.session import Flags
from tests.graph.artifact_files import (
    ROWS,
    Head,
    Keeps,
    Stub,
    altered,
    compiled_head,
    rows,
    same,
    saved,
    use_stub,
)


@pytest.fixture(autouse=True)
def stub(monkeypatch):
    return use_stub(monkeypatch)


@pytest.fixture
def path(tmp_path):
    return saved(compiled_head()[1], tmp_path / "head.dlinfer")


@pytest.fixture
def session(path):
    with dlinfer.load(path) as session:
        yield session


@pytest.fixture
def owned(path):
    with dlinfer.load(path, options={"io": "owned"}) as session:
        yield session


def wanted(count, seed=0):
    return Head().eval()(rows(count, seed))


# --- running


def test_torch_gives_torch_and_numpy_gives_numpy(session):
    """S3-26."""
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
        def resolve(self, reference):
            function = super().resolve(reference)

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
        ({}, "'x': it was not given"),
        ({"x": rows(3), "y": rows(3)}, "'y': it takes x"),
        ({"y": rows(3)}, "'x': it was not given"),
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
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_do_not_fit(session, value):
    with pytest.raises(ArtifactInputError, match="'x'"):
        session.run({"x": value})
    same(session.run({"x": rows(3)}), wanted(3))


@pytest.mark.parametrize("target", [torch.empty(2, 4), torch.empty(3, 4, dtype=torch.float64), None, [1.0]])
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
    """S0-20 to S0-22: 0 where it went well, 1 where not, and last_error says why."""
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
    assert "it has forward" in str(session.last_error)


def test_an_engine_that_fails_leaves_a_session_that_runs(monkeypatch, tmp_path):
    broken = threading.Event()

    class Fails(Stub):
        def resolve(self, reference):
            function = super().resolve(reference)

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
    """S0-33: stages are shape profiles of one entry."""
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
    with pytest.raises(SessionCallError, match="it has prefill, decode"):
        session.run({"x": rows(4), "slots": torch.arange(4)})


# --- introspection


def test_what_goes_in_and_comes_out(session, owned):
    """S0-30 to S0-48, S3-22, S3-23."""
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


# --- tensors of its own


def test_its_own_tensors_go_in_and_come_out_without_a_copy(owned):
    """S0-60 to S0-65."""
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


def test_mode_0_gives_its_own_tensors_only_by_the_call_that_says_so(session):
    """S0-66 to S0-69."""
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
    """S1-90, U6."""
    first, second, third = dlinfer.load(path), dlinfer.load(path), dlinfer.load(path)
    second.share_weights_with(first)
    assert weights_of(first) == weights_of(second)
    assert not set(weights_of(third)) & set(weights_of(first))
    same(second.run({"x": rows(3)}), wanted(3))
    with pytest.raises(SessionCallError, match="reset"):
        second.share_weights_with(third)
    other = saved(dlinfer.compile(Head(1).eval(), (rows(2),)), tmp_path / "other.dlinfer")
    with pytest.raises(SessionCallError, match="not these"):
        dlinfer.load(other).share_weights_with(first)


def test_two_sessions_share_runtime_memory(path):
    """S1-91, S0-13."""
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


# --- life and options


def test_set_up_once_reset_and_again(path):
    """S3-24, S3-25."""
    session = dlinfer.load(path)
    assert not session.is_set_up
    session.setup()
    session.setup()
    assert session.is_set_up
    session.reset()
    assert not session.is_set_up
    same(session.run({"x": rows(3)}), wanted(3))
    assert session.is_set_up


def test_options_before_and_after_set_up(session):
    """S3-20, S3-21."""
    assert set(session.backend_options()) == set(session.options.names())
    session.update_backend_options(fallback="allow")
    assert session.backend_options()["fallback"] == "allow"
    session.setup()
    assert session.backend_options() == {"io": "caller", "enable_metrics": True, "enable_profiling": False}
    session.update_backend_options(enable_metrics=False)
    with pytest.raises(SessionOptionError, match="reset"):
        session.update_backend_options(fallback="error")
    with pytest.raises(SessionOptionError, match="engine, engine_options, fallback"):
        session.update_backend_options(colour="blue")


def test_options_of_a_yaml_file(path, tmp_path):
    """U14."""
    file = tmp_path / "options.yaml"
    file.write_text("io: owned\nenable_profiling: true\n")
    session = dlinfer.load(path, options=file)
    assert (session.options.io, session.options.enable_profiling) == ("owned", True)
    for text in ("[1, 2]", "io: [", "io: sideways", "colour: blue", "1: 2", "!!python/object:os.system {}"):
        file.write_text(text)
        with pytest.raises(SessionOptionError):
            dlinfer.load(path, options=file)
    with pytest.raises(SessionOptionError, match="No such file"):
        dlinfer.load(path, options=tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    "options",
    [
        {"io": "theirs"},
        {"fallback": "maybe"},
        {"engine": 3},
        {"engine_options": "device=CPU"},
        {"enable_metrics": "yes"},
        {"allow_ops": "aten::add"},
        {"cache_dir": 3},
    ],
)
def test_options_that_have_no_such_value(path, options):
    with pytest.raises(SessionOptionError, match=next(iter(options))):
        dlinfer.load(path, options=options)


def test_the_engines_own_options_are_kept_where_they_are_meant_to_be(tmp_path, monkeypatch):
    """The session's go before the file's; of a file's only those count that change results."""

    class Told(Stub):
        stored_options = ("precision", "group")

        def check_options(self, options):
            self.told = dict(options)
            if "colour" in options:
                raise CompileOptionError(option="colour", given=options["colour"], expected="none")

    engine = use_stub(monkeypatch, Told())
    given = {"precision": "bf16", "group": 32, "folder": "/tmp/x"}
    path = saved(compiled_head(options={"engine_options": given})[1], tmp_path / "a.dlinfer")
    dlinfer.load(path).setup()
    assert engine.told == {"precision": "bf16", "group": 32}
    dlinfer.load(path, options={"engine_options": {"group": 64}}).setup()
    assert engine.told == {"precision": "bf16", "group": 64}

    def change(manifest, graph):
        manifest["stages"][0]["engine_options"]["folder"] = "/etc"

    dlinfer.load(altered(path.read_bytes(), change)).setup()
    assert engine.told == {"precision": "bf16", "group": 32}
    with pytest.raises(CompileOptionError, match="colour"):
        dlinfer.load(path, options={"engine_options": {"colour": "blue"}}).setup()


@pytest.mark.parametrize("devices", [["cpu"], [0], [torch.device("cpu")], ["cpu:0"]])
def test_devices_it_was_made_for(path, devices):
    """S0-01, U2."""
    assert dlinfer.load(path, devices=devices).get_device_ids() == [0]


@pytest.mark.parametrize("devices", [["cuda"], [], ["cpu", "cuda:1"], ["meta"]])
def test_devices_it_was_not_made_for(path, devices):
    with pytest.raises(SessionOptionError, match="made for: cpu"):
        dlinfer.load(path, devices=devices)


# --- dumps and plans


def test_runs_are_dumped_as_text(session, tmp_path):
    """S1-100."""
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
    """S1-101; bfloat16, which numpy lacks, as float32 under its name."""
    linear = nn.Linear(4, 3).to(torch.bfloat16).eval()
    x = torch.randn(2, 4).to(torch.bfloat16)
    session = dlinfer.load(saved(dlinfer.compile(linear, (x,)), tmp_path / "a.dlinfer"))
    session.io_bin_dump(tmp_path / "io")
    found = session.run({"input": x})["output"]
    names = sorted(path.name for path in (tmp_path / "io").iterdir())
    assert names == ["000000_forward_input_input.bfloat16.npy", "000000_forward_output_output.bfloat16.npy"]
    kept = torch.from_numpy(np.load(tmp_path / "io" / names[1])).to(torch.bfloat16)
    assert kept.equal(found)


def test_the_memory_plan_counts_every_value(owned, tmp_path):
    """S1-86, U10: at 16 rows, layer_norm gives 512 bytes, linear 256, argmax 128; sums of those that live at once."""
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
