"""What LMDeploy 0.18 imports of dlinfer for camb, called from its own code as it calls it, on the simulated MLU."""

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
from dlinfer.framework.lmdeploy_ext.device import activation, vendor_devices
from dlinfer.vendor.camb import VENDOR
from tests.vendor.camb.simulated_mlu import install

SOURCES = Path(lmdeploy.__file__).parent
MLU = install.NAME
OTHERS = re.compile(r"ascend|maca")


def imported() -> set[tuple[str, str]]:
    """(module, name) of each import of dlinfer's in LMDeploy's sources, but what is other devices' alone."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        if "dlinfer" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and re.match(r"dlinfer\b", node.module or "")
                and not node.level
            ):
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if re.match(r"dlinfer\b", alias.name)}
    return {one for one in found if not OTHERS.search(".".join(one))}


def test_every_name_is_there():
    names = imported()
    assert ("dlinfer.framework.lmdeploy_ext", "") in names and len(names) > 4
    for module, name in sorted(names):
        loaded = importlib.import_module(module)
        assert not name or hasattr(loaded, name), f"{module}.{name}"


def test_importing_what_lmdeploy_imports_for_camb():
    """``try_import_deeplink`` and ``vendor_name``, of which LMDeploy asks who is there."""
    from lmdeploy.utils import try_import_deeplink

    assert "camb" in vendor_devices.usable()
    try_import_deeplink("camb")
    assert activation.active() == "camb" and activation.torch_device() == MLU
    assert importlib.import_module("dlinfer.vendor").vendor_name == "camb"


def test_lmdeploy_s_own_backend_is_not_asked():
    """This adaptor's backend stands where LMDeploy's own would, which no step of 0.18 gets through."""
    from lmdeploy.pytorch.backends import get_backend
    from lmdeploy.pytorch.backends.dlinfer.camb.op_backend import CambOpsBackend

    assert get_backend("camb") is not CambOpsBackend
    lengths = torch.tensor([3, 2], device=MLU)
    step: Any = SimpleNamespace(
        kv_caches=[(torch.zeros(VENDOR.kv_cache_layout.shape(4, 16, 2, 64), device=MLU),)],
        q_start_loc=torch.tensor([0, 3], device=MLU),
        q_seqlens=lengths,
        kv_seqlens=lengths,
        block_offsets=torch.tensor([[0], [1]], device=MLU),
        is_decoding=False,
    )
    with pytest.raises(TypeError, match="cu_seq_lens_kv"):
        CambOpsBackend.update_step_context(step)


def test_caches_lie_as_lmdeploy_lays_them_out_for_camb():
    from lmdeploy.pytorch.backends.dlinfer.camb.op_backend import CambOpsBackend

    ours = VENDOR.kv_cache_layout.shape(1, 16, 2, 64)[1:]
    for theirs in (CambOpsBackend.get_k_block_shape, CambOpsBackend.get_v_block_shape):
        assert theirs(16, 2, 64, torch.float16) == ours


def test_blocks_of_16_slots():
    from lmdeploy import PytorchEngineConfig

    from dlinfer.errors import UnsupportedFeatureError

    config = PytorchEngineConfig(device_type="camb")
    assert (config.block_size, config.kernel_block_size) == (64, 16)
    assert PytorchEngineConfig(device_type="camb", block_size=32).kernel_block_size == 16
    with pytest.raises(UnsupportedFeatureError, match="kernel_block_size=32"):
        PytorchEngineConfig(device_type="camb", kernel_block_size=32)


@pytest.mark.parametrize("decoding", [False, True], ids=["prompts", "decoding"])
def test_lmdeploy_s_own_layer_calls_the_kernels(decoding):
    """``paged_attention_fwd``, as LMDeploy's layers for dlinfer's devices call it."""
    from lmdeploy.pytorch.kernels.dlinfer import fill_kv_cache, paged_attention_fwd

    q_lens, kv_lens = ([1, 1], [3, 4]) if decoding else ([3, 4], [3, 4])
    rows = sum(q_lens)
    q, k, v = (torch.randn(rows, heads, 64, dtype=torch.float16) for heads in (4, 2, 2))
    ends = torch.tensor([0, q_lens[0], rows], dtype=torch.int32)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    keys, values = (torch.randn(2, 2, 16, 64, dtype=torch.float16, device=MLU) for _ in range(2))
    slots = [16 * row + kv_lens[row] - q_lens[row] + n for row in range(2) for n in range(q_lens[row])]
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=MLU)
    fill_kv_cache(
        *(k.to(MLU), v.to(MLU), keys, values, torch.tensor(slots, dtype=torch.int32, device=MLU)), [], [], 0
    )
    out = paged_attention_fwd(
        *(q.to(MLU), k.to(MLU), v.to(MLU), torch.empty(q.shape, dtype=q.dtype, device=MLU), keys, values),
        *(table, torch.tensor(q_lens, device=MLU), lengths.to(MLU), max(q_lens), max(kv_lens)),
        *(decoding, 16, 4, 2, 64, ends.to(MLU), ends, lengths),
        softmax_scale=0.125,
        is_prefill_no_cache=True,
    )
    want = torch.empty_like(q)
    pages = [VENDOR.kv_cache_layout.canonical(one.cpu()) for one in (keys, values)]
    spans = ends[1:], lengths, max(q_lens), max(kv_lens), 4, 2, want, 0.125, True, -1, -1, 0.0, None, None
    ops.paged_prefill_attention.reference(q, *pages, table.cpu(), 16, *spans)
    torch.testing.assert_close(out.cpu(), want, rtol=2e-3, atol=2e-3)
    assert install.calls["reshape_paged_cache"] == 1
    assert install.calls["single_query_cached_kv_attn" if decoding else "flash_attention"] == 1
