"""What LMDeploy 0.18 imports of dlinfer for Ascend, called from its own code as it calls it, on the simulated NPU."""

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdeploy
import pytest
import torch

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError, VendorUnavailableError
from dlinfer.vendor.ascend import VENDOR, chips, diagnosis, moe, sdk, version
from tests.vendor.ascend.simulated_npu import install

SOURCES = Path(lmdeploy.__file__).parent
NPU = install.NAME


def imported() -> set[tuple[str, str]]:
    """(module, name) of each import of dlinfer's in LMDeploy's sources."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        if "dlinfer" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and re.match(r"dlinfer\b", node.module)
                and not node.level
            ):
                found |= {(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if re.match(r"dlinfer\b", alias.name)}
    return found


def test_every_name_is_there():
    names = imported()
    assert ("dlinfer.vendor.ascend.version", "ensure_ascend_runtime") in names and len(names) > 8
    for module, name in sorted(names):
        loaded = importlib.import_module(module)
        assert not name or hasattr(loaded, name), f"{module}.{name}"


def test_lmdeploy_s_own_backend_starts():
    """AscendOpsBackend.init, in the order of its imports; transfer_to_npu and Triton are warnings there."""
    from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend, SocVersion

    SocVersion.device_name.cache_clear()
    SocVersion.soc_version.cache_clear()
    AscendOpsBackend.init()
    assert AscendOpsBackend.device_count() == 1
    assert SocVersion.is_Ascend910() and SocVersion.is_A2() and not SocVersion.is_A3()
    ours = VENDOR.kv_cache_layout.shape(1, 128, 2, 64)[1:]
    assert AscendOpsBackend.get_k_block_shape(128, 2, 64, torch.float16) == ours


def test_lmdeploy_builds_its_runner():
    from lmdeploy.pytorch.backends.dlinfer.ascend.op_backend import AscendOpsBackend

    model = torch.nn.Linear(2, 2)
    model.ctx_mgr = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType] - LMDeploy's models have one
    config: Any = SimpleNamespace(k_head_dim=64, v_head_dim=64)
    cache: Any = SimpleNamespace(max_batches=8)
    device = torch.device(NPU)
    eager: Any = SimpleNamespace(eager_mode=True)
    runner = AscendOpsBackend.build_graph_runner(model, config, cache, eager, device)
    assert runner.model is model
    eager.eager_mode = False
    with pytest.raises(UnsupportedFeatureError, match="eager_mode=True"):
        AscendOpsBackend.build_graph_runner(model, config, cache, eager, device)


@pytest.mark.parametrize(
    ("size", "least"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (250, 256), (257, 512)]
)
def test_sizes_of_graphs(size, least):
    from dlinfer.framework.lmdeploy_ext.cudagraph.ascend_cudagraph import get_ascend_compatible_size

    assert get_ascend_compatible_size(size) == least


def test_lmdeploy_stores_experts(monkeypatch):
    from lmdeploy.pytorch.backends.dlinfer.moe import DlinferFusedMoEImpl

    layer = DlinferFusedMoEImpl(top_k=2, num_experts=8)
    assert importlib.import_module("dlinfer.vendor").vendor_name == "ascend"
    assert layer.build_expert_storage(8) == (8, None)
    weights = torch.ones(8, 4, 2), torch.ones(8, 2, 2)
    assert layer.update_weights(*weights) == weights
    with pytest.raises(ValueError, match="1024 groups"):
        layer.build_expert_storage(2000)


def test_a_layout_of_chunks():
    layout = moe.ChunkedLayout(experts=5, chunk=2, stride=3)
    assert layout.packed
    places = [moe.chunked_moe_storage_expert_id(expert, layout) for expert in range(5)]
    assert places == [0, 1, 3, 4, 6]
    gate_up, down = torch.ones(9, 4, 2), torch.ones(9, 2, 2)
    moe.zero_chunked_moe_weight_padding(gate_up, down, layout)
    for weights in (gate_up, down):
        assert [place for place in range(9) if weights[place].any()] == places
    assert moe.chunked_moe_storage_expert_id(3, None) == 3


def test_the_mask_that_lmdeploy_gives_at_every_prefill():
    """AscendOpsBackend passes the causal template; an op takes it for what it means, and refuses another."""
    from lmdeploy.pytorch.kernels.dlinfer import paged_attention_fwd

    mask = torch.triu(torch.ones(2048, 2048, dtype=torch.int8, device=NPU), diagonal=1)
    q, k, v = (torch.randn(7, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    caches = [torch.zeros(2, 128, 2, 64, dtype=torch.float16, device=NPU) for _ in range(2)]

    def call(mask: torch.Tensor) -> torch.Tensor:
        given = [x.to(NPU) for x in (q, k, v)]
        table = torch.tensor([[0], [1]], dtype=torch.int32, device=NPU)
        return paged_attention_fwd(
            *(
                given[0],
                given[1],
                given[2],
                given[0],
                caches[0],
                caches[1],
                table,
                lengths,
                lengths,
                4,
                4,
                False,
            ),
            *(128, 4, 2, 64, ends, ends, lengths),
            attn_mask=[mask],
            softmax_scale=0.125,
            is_prefill_no_cache=True,
        )

    want = torch.empty_like(q)
    plain = q, k, v, ends[1:], lengths, 4, 4, 2, want, 0.125, True, -1, -1, 0.0, None, None
    ops.prefill_attention.reference(*plain)
    torch.testing.assert_close(call(mask).cpu(), want, rtol=2e-3, atol=2e-3)
    with pytest.raises(UnsupportedFeatureError, match="explicit attn_mask"):
        call(mask.t().contiguous())


def test_the_runtime_is_looked_at(monkeypatch):
    version.ensure_ascend_runtime()
    assert diagnosis.torch_npu_version() == ""
    monkeypatch.setattr(diagnosis, "torch_npu_version", lambda: "2.9.0.post1")
    with pytest.raises(VendorUnavailableError, match=r"torch_npu 2\.9\.0\.post1 does not fit"):
        version.ensure_ascend_runtime()


def test_a_probe_says_why_not(monkeypatch):
    assert sdk.probe().available
    npu = sdk.cards()
    monkeypatch.setattr(type(npu), "device_count", lambda self: 0)
    assert sdk.probe().reason.startswith("torch_npu sees no NPU")

    def fails(self):
        raise RuntimeError("no driver\nmore")

    monkeypatch.setattr(type(npu), "device_count", fails)
    assert sdk.probe().reason == "torch_npu cannot be loaded: RuntimeError: no driver"


@pytest.mark.parametrize(
    ("name", "number", "chip"),
    [
        ("Ascend910B2", 223, chips.A2),
        ("Ascend910_9391", 252, chips.A3),
        ("Ascend910B4", None, chips.A2),
        ("Ascend310P3", 202, chips.DUO),
        ("Ascend950", 300, chips.UNKNOWN),
    ],
)
def test_generations(name, number, chip):
    assert chips.named(name, number) is chip


def test_a_310p_refuses_by_name_what_its_documents_lack():
    install.chip.update(name="Ascend310P3", version=202)
    chips.current.cache_clear()
    from dlinfer.ops.core import kernels

    half, brain = (
        torch.ones(2, 64, dtype=torch.float16, device=NPU),
        torch.ones(2, 64, dtype=torch.bfloat16, device=NPU),
    )
    assert kernels.refusal("rms_norm", NPU, (half, half[0], 1e-6)) is None
    assert "bfloat16" in (kernels.refusal("rms_norm", NPU, (brain, brain[0], 1e-6)) or "")
    assert "310P" in (kernels.refusal("silu_and_mul", NPU, (half,)) or "")
    q = torch.ones(2, 4, 64, dtype=torch.float16, device=NPU)
    ends = torch.tensor([2])
    args = q, q, q, ends, ends, 2, 4, 4, q, 1.0, True, -1, -1, 0.0, None, None
    assert "npu_fused_infer_attention_score" in (kernels.refusal("prefill_attention", NPU, args) or "")
