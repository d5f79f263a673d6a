"""Checkpoints in floats that DLINFER_CPU_WEIGHTS packs while they load: equal to what is written, refused by name."""

import json
import logging
import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.config import _patch_quantization_config
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from dlinfer import settings
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion import (
    floats,
    loading,
    model_files,
    plan,
)
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4
from dlinfer.framework.lmdeploy_ext.layers.quantised import head as packed_head
from dlinfer.framework.lmdeploy_ext.layers.quantised.head import PackedEmbedding, PackedHead
from dlinfer.framework.lmdeploy_ext.quantise.run import quantise
from dlinfer.framework.lmdeploy_ext.quantise.source import ADMITTED
from tests.framework.lmdeploy_ext.quantise import folders


@pytest.fixture(autouse=True)
def on_cpu():
    PytorchEngineConfig(device_type="cpu")
    torch.manual_seed(0)


def packed_as(folder: Path, bits: str) -> dict[str, torch.Tensor]:
    """The tensors of a folder as LMDeploy's loader is handed them."""
    way = floats.plan(bits, json.loads((folder / "config.json").read_text()))
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        for name, tensor in model_files.tensors(file):
            found |= {one: made.clone() for one, made in way.convert(name, tensor, None)}
    return found


@pytest.mark.parametrize(("bits", "form"), [("int8", W8A8()), ("int4", AwqInt4(128))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_tensor_is_what_the_command_writes(tmp_path, bits, form, dtype):
    folders.write(tmp_path / "floats", folders.tensors(dtype), shards=2)
    quantise(tmp_path / "floats", tmp_path / "out", form)
    want: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            want |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
    got = packed_as(tmp_path / "floats", bits)
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype is want[name].dtype
        assert torch.equal(tensor, want[name]), name


@given(rows=st.integers(1, 40), columns=st.integers(1, 3), bits=st.sampled_from(["int8", "int4"]))
def test_pieces_are_the_whole(rows, columns, bits):
    form = W8A8() if bits == "int8" else AwqInt4(32)
    weight = torch.randn(rows * 8, columns * 32, generator=torch.Generator().manual_seed(rows))
    before, floats._PIECE = floats._PIECE, 1  # as few rows as there may be
    try:
        got = floats.packed("X", form, "w", weight)
    finally:
        floats._PIECE = before
    for part, numbers in form.quantise(weight).items():
        assert torch.equal(got[part], numbers)


def test_the_command_and_the_setting_take_the_same_dense_classes():
    for bits in floats.ADMITTED:
        assert set(ADMITTED) <= set(floats.ADMITTED[bits])


@pytest.mark.parametrize(
    ("bits", "config", "says"),
    [
        ("int4", {"intermediate_size": 100}, "intermediate_size = 100"),
    ],
)
def test_what_is_not_packed_is_refused_by_name(bits, config, says):
    with pytest.raises(UnsupportedFeatureError, match="DLINFER_CPU_WEIGHTS") as caught:
        floats.plan(bits, folders.CONFIG | config)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("bits", "names", "converts"),
    [
        ("int8", ["LlamaForCausalLM"], True),
        ("int8", ["Qwen3MoeForCausalLM"], False),
        ("int4", ["Qwen3MoeForCausalLM"], True),
        ("int4", ["DeepseekV3ForCausalLM"], False),
        ("int4", [], False),
        ("bf12", ["LlamaForCausalLM"], False),
    ],
)
def test_classes_that_lmdeploy_does_not_build_quantised_are_packed_in_place(bits, names, converts):
    config = hf_config(architectures=names)
    with settings.override(cpu_weights=bits):
        loading.rewrite(config)
        in_place, packs_head = plan.packs_in_place(config), plan.packs_head(config)
    assert hasattr(config, "quantization_config") == converts
    assert in_place == ("" if converts else bits)
    assert packs_head == (bits != "bf12")


def test_sizes_that_128_does_not_divide_get_smaller_groups():
    way = floats.plan("int4", folders.CONFIG | {"intermediate_size": 160})
    assert way.config is not None
    assert way.config["group_size"] == 32


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.full((8, 32), float("nan")), "infinity or NaN"),
        (torch.full((8, 32), 1e38), "too large"),
        (torch.zeros(8, 32, dtype=torch.int8), "torch.int8"),
        (torch.zeros(8), "shape"),
        (torch.zeros(8, 31), "multiple"),
    ],
)
def test_what_cannot_be_packed_is_refused_as_it_is_read(weight, says):
    with pytest.raises(UnsupportedFeatureError, match=says):
        floats.packed("DLINFER_CPU_WEIGHTS=int4", AwqInt4(32), "model.layers.0.mlp.up_proj.weight", weight)


def hf_config(**more: Any) -> Any:
    config = folders.CONFIG | more
    return SimpleNamespace(**config, to_dict=lambda: dict(config))


def test_lmdeploy_is_given_a_configuration_and_keeps_the_dtype():
    with settings.override(cpu_weights="int4"):
        config = _patch_quantization_config(hf_config())
    assert config.quantization_config["quant_method"] == "awq"
    assert loading.stored_dtype(config) == "bfloat16"
    assert not hasattr(_patch_quantization_config(hf_config()), "quantization_config")


def test_a_quantised_checkpoint_stays_and_is_told_of(caplog):
    quantised = hf_config(quantization_config=W8A8().config())
    with settings.override(cpu_weights="int4"), caplog.at_level(logging.WARNING, "dlinfer"):
        config = _patch_quantization_config(quantised)
    assert config.quantization_config == W8A8().config()
    assert "already quantised (smooth_quant)" in caplog.text


def test_mapped_tensors_are_those_of_the_file_and_may_be_kept(tmp_path):
    want = {
        "empty": torch.empty(0, 3),
        "small": torch.arange(3, dtype=torch.uint8),
        "large": torch.randn(3 * mmap.PAGESIZE),
        "strided": torch.randn(70, 50).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
    }
    want |= {name: torch.ones(5).to(dtype) for name, dtype in model_files.DTYPES.items()}
    save_file(want, tmp_path / "model.safetensors", {"format": "pt"})
    got = dict(model_files.tensors(tmp_path / "model.safetensors", "x."))
    assert got.keys() == {f"x.{name}" for name in want}
    for name, tensor in want.items():
        found = got[f"x.{name}"]
        assert found.dtype is tensor.dtype
        assert found.shape == tensor.shape
        assert found.numel() == 0 or torch.equal(
            found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


def test_a_dtype_that_is_not_mapped_is_refused_by_name(tmp_path):
    weights = {"w": torch.ones(2), "odd": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedFeatureError, match=r"F4 of tensor 'odd' in .*unset DLINFER_CPU_WEIGHTS"):
        next(model_files.tensors(tmp_path / "model.safetensors"))


class Tiny(nn.Module):
    """What the loading of a packed projection asks of a model."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        numbers = nn.Parameter(torch.empty(40, 16, dtype=torch.int8), requires_grad=False)
        scales = nn.Parameter(torch.empty(40, 1), requires_grad=False)
        self.model = nn.Module()
        if tied:
            self.model.embed_tokens = PackedEmbedding(numbers, scales, torch.float32)
        self.lm_head = PackedHead(numbers, scales, torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_is_packed_once_and_looked_up(tied):
    model: Any = Tiny(tied)
    stored = {"model.embed_tokens.weight": torch.randn(40, 16), "lm_head.weight": torch.randn(40, 16)}
    loaded = dict(floats.packed_head(stored.items(), model))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(loaded.pop(name))
    assert loaded.keys() == (set() if tied else {"model.embed_tokens.weight"})
    weight = stored["model.embed_tokens.weight" if tied else "lm_head.weight"]
    wide = W8A8().dequantise(W8A8().quantise(weight))
    x = torch.randn(5, 16)
    # The input is rounded to steps of its largest number over 127: half of one, for each of 16 products.
    bound = (x.abs().amax(1, keepdim=True) / 254) * wide.abs().sum(1)
    assert ((model.lm_head(x) - x @ wide.t()).abs() <= bound + 1e-4).all()
    if tied:
        ids = torch.tensor([[0, 39, 7], [3, 3, 0]])
        assert torch.equal(model.model.embed_tokens(ids), wide[ids])


class GemmaForCausalLM(nn.Module):
    """A class whose logits are more than its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(16, 40, bias=False)


class LlamaForCausalLM(GemmaForCausalLM):
    """A class that is packed, where its projection is of the embedding's dtype."""

    def get_input_embeddings(self) -> nn.Module:
        return nn.Embedding(40, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "says"),
    [(GemmaForCausalLM, "class GemmaForCausalLM"), (LlamaForCausalLM, "its dtype float32 differs")],
)
@pytest.mark.parametrize("asked", ["int8", ""])
def test_a_projection_that_stays_is_told_of_where_it_was_asked_for(model, says, asked, caplog):
    made = model()
    before = made.lm_head
    with settings.override(cpu_head=asked), caplog.at_level(logging.WARNING, "dlinfer"):
        packed_head.pack(made, tied=False)
    assert made.lm_head is before
    assert ("DLINFER_CPU_HEAD=int8 has no effect" in caplog.text, says in caplog.text) == (bool(asked),) * 2
