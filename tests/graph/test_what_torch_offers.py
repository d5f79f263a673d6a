"""What torch offers for things that dlinfer does itself, and why it does not do.

Each test is the reason of a decision in docs/internals/torch_parts.md. Where one fails, torch has changed: look
whether its own way will do now.
"""

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch.fx.passes.graph_drawer import FxGraphDrawer

from dlinfer import ops

BLOCKS = 8
MEMORY = torch.zeros(8)


class Step(nn.Module):
    """Writes one layer's caches, which are cut from one memory as LMDeploy's may be, and reads one."""

    def forward(self, k: Tensor, v: Tensor, caches: Tensor, slots: Tensor) -> tuple[Tensor]:
        ops.fill_kv_cache(k, v, caches[0], caches[1], slots)
        return (caches[0].sum(),)


def arguments() -> tuple[Tensor, ...]:
    return (
        torch.randn(3, 2, 4),
        torch.randn(3, 2, 4),
        torch.zeros(2, BLOCKS, 16, 2, 4),
        torch.tensor([0, 1, 17]),
    )


def test_functionalize_refuses_an_op_that_declares_its_writes():
    with pytest.raises(RuntimeError, match="operator whose output has alias annotations"):
        torch.func.functionalize(Step())(*arguments())


def test_auto_functionalized_gives_new_memory_and_numbers_for_strides():
    """An engine would have to know a higher-order op; run as it is, it copies the caches at each call."""
    given = arguments()
    graph: Any = aot_export_module(Step(), given, trace_joint=False)[0]
    (call,) = (node for node in graph.graph.nodes if "auto_functionalized" in str(node.target))
    assert call.kwargs["_k_cache_size"] == given[2][0].shape
    assert call.kwargs["_v_cache_storage_offset"] == given[2][0].numel()
    content, _ = graph(*given)
    assert content.data_ptr() != given[2].data_ptr()
    assert not given[2].any()  # whoever calls has to copy the content back
    assert content.any()


def test_a_view_of_a_written_input_is_no_view_of_it_any_more():
    class Transposed(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            x[:, 2:4].copy_(y)
            return (x.t(),)

    x = torch.zeros(4, 8)
    content, transposed = aot_export_module(Transposed(), (x, torch.ones(4, 2)), trace_joint=False)[0](
        x, torch.ones(4, 2)
    )
    assert transposed.untyped_storage().data_ptr() == content.untyped_storage().data_ptr() != x.data_ptr()


def test_the_graph_drawer_needs_a_package_and_draws_every_node():
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    if importlib.util.find_spec("pydot") is None:
        with pytest.raises(RuntimeError, match="pydot"):
            FxGraphDrawer(module, "it")
    else:
        drawn = FxGraphDrawer(module, "it").get_dot_graph().get_nodes()
        assert len(drawn) == len(module.graph.nodes)


def test_onnx_export_drops_what_is_written():
    pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")

    class Writes(nn.Module):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache[:2].add_(x[:2])
            return x + cache

    program = torch.onnx.export(
        Writes().eval(), (torch.randn(4, 8), torch.zeros(4, 8)), dynamo=True, verbose=False
    )
    assert program is not None
    assert len(program.model.graph.inputs) == 2
    assert len(program.model.graph.outputs) == 1  # the sum; the cache's new content is nowhere


def test_onnx_export_refuses_ops_of_others_that_write():
    pytest.importorskip("onnxscript", reason="writing ONNX needs onnxscript")
    table = {
        torch.ops.dlinfer.fill_kv_cache.default: lambda k, v, k_cache, v_cache, slots: (k_cache, v_cache)
    }
    with pytest.raises(Exception, match="auto_functionalized"):
        torch.onnx.export(
            Step().eval(), arguments(), dynamo=True, verbose=False, custom_translation_table=table
        )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4096.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).view(-1)


def pt2_archive(path: Path) -> Path:
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Scaled(), (torch.ones(4, 4096),), dynamic_shapes=({0: rows},))
    torch.export.save(program, path)
    return path


def test_a_pt2_archive_loads_damaged_weights_in_silence_and_copies_them(tmp_path):
    path = pt2_archive(tmp_path / "a.pt2")
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(1000.0, 1010.0).numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(data)
    (weight,) = torch.export.load(path).state_dict.values()
    assert not torch.equal(weight, Scaled().weight)
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_pt2_archive_runs_the_python_that_stands_in_its_sizes(tmp_path):
    """What ``dlinfer.utils.size_text`` parses, torch gives to ``sympy.sympify``."""
    ran = tmp_path / "ran"
    forged = tmp_path / "forged.pt2"
    with zipfile.ZipFile(pt2_archive(tmp_path / "a.pt2")) as sound, zipfile.ZipFile(forged, "w") as target:
        for name in sound.namelist():
            contents = sound.read(name)
            if name.endswith("models/model.json"):
                assert b"Integer(4096), Symbol(" in contents
                call = f"+ 0*__import__('pathlib').Path('{ran}').write_text('x')".encode()
                contents = contents.replace(b"Mul(Integer(4096)", b"Mul(Integer(4096)" + call)
            target.writestr(name, contents)
    torch.export.load(forged)
    assert ran.exists()


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"a": torch.zeros(4, 4).t()}, "non contiguous"),
        ({"a": MEMORY[:6], "b": MEMORY[2:]}, "share memory"),
        ({"a": torch.zeros(4, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_safetensors_does_not_hold_every_weight(tensors, why, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    with pytest.raises((ValueError, RuntimeError, KeyError), match=why):
        save_file(tensors, tmp_path / "a.safetensors")


def test_safetensors_loads_damaged_weights_in_silence(tmp_path):
    tools = pytest.importorskip("safetensors.torch")
    path = tmp_path / "a.safetensors"
    tools.save_file({"weight": Scaled().weight.detach()}, path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    assert not torch.equal(tools.load_file(path)["weight"], Scaled().weight)


def flagged(x: Tensor, double: bool) -> Tensor:
    return x * 2 if double else x * 3


def test_without_guards_another_flag_runs_the_first_ones_graph():
    options: Any = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = torch.compile(flagged, backend="eager", fullgraph=True, options=options)
    x = torch.ones(3)
    assert torch.equal(compiled(x, True), compiled(x, False))
    ahead: Any = torch.compile(flagged, backend="inductor", fullgraph=True)
    ahead = ahead.aot_compile(((x, True), {}))
    ahead.disable_guard_check()
    assert torch.equal(ahead(x, True), ahead(x, False))


def test_aot_compile_wants_classes_at_the_top_level_of_a_module():
    from torch._dynamo.exc import PackageError

    class Local(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    compiled: Any = torch.compile(Local(3, 3).forward, backend="inductor", fullgraph=True)
    refusals = (TypeError, PackageError)  # the second since torch 2.15
    with torch.no_grad(), pytest.raises(refusals, match="defined in local scope"):
        compiled.aot_compile(((torch.ones(2, 3),), {}))


def test_sympify_evaluates_python():
    import sympy

    assert sympy.sympify("__import__('math').floor(2.5)") == 2
