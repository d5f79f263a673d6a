"""Layers of int8 and int4 that were packed in place: their values, what they compute, and which layers they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4
from dlinfer.framework.lmdeploy_ext.layers.quantised import few_bits
from dlinfer.framework.lmdeploy_ext.layers.quantised.packing import Form, Weight

ROWS, COLUMNS, EXPERTS = 48, 96, 3
FORMS = [few_bits.Int8(), few_bits.Int4().of(COLUMNS)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def loaded(form: Form, *shape: int) -> tuple[Weight, Tensor]:
    """A weight after LMDeploy loaded it in two parts, and what it was."""
    module: Any = nn.Module()
    held: Any = nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16), requires_grad=False)
    module.weight = held

    def load(parameter: nn.Parameter, part: Tensor, number: int) -> None:
        parameter.data.chunk(2, -2)[number].copy_(part)

    held.weight_loader = load
    weight, plain = Weight(module, form, name="a layer"), torch.randn(*shape).bfloat16()
    for number, part in enumerate(plain.chunk(2, -2)):
        assert not weight.is_packed
        held.weight_loader(held, part, number)
    return weight, plain


def values(form: Form, plain: Tensor) -> Tensor:
    own = W8A8() if form.bits == "int8" else AwqInt4(32)
    return own.dequantise(own.quantise(plain))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.bits)
def test_a_layer_has_the_values_of_the_written_format(form: Form) -> None:
    weight, plain = loaded(form, ROWS, COLUMNS)
    assert weight.is_packed
    assert weight.nbytes == form.least_bytes(ROWS, COLUMNS)
    layer = form.linear(weight)
    got = layer.get_unquantized_weight(weight.parameter)
    assert torch.equal(got, values(form, plain).bfloat16())
    beside = weight.module.packed_beside
    assert [one.data_ptr() for one in beside] == [one.data_ptr() for one in layer.others]
    weight.unpack()
    assert torch.equal(weight.parameter.data, got)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.bits)
def test_a_layer_computes_with_these_values(form: Form) -> None:
    weight, plain = loaded(form, ROWS, COLUMNS)
    x, bias = torch.randn(1, 5, COLUMNS).bfloat16(), torch.randn(ROWS).bfloat16()
    got = form.linear(weight).forward(x, weight.parameter, bias, False, None)
    seen = x.float()
    if form.bits == "int8":
        numbers, scales = ops.dynamic_quant(x, torch.int8)
        seen = numbers.float() * scales
    want = seen @ values(form, plain).half().float().t() + bias.float()
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.bits)
def test_experts_are_computed_from_packed_stacks(form: Form) -> None:
    hidden, inner = COLUMNS, ROWS
    form = form.of(hidden, inner)
    gate_up, plain = loaded(form, EXPERTS, 2 * inner, hidden)
    down, plain_down = loaded(form, EXPERTS, hidden, inner)
    layer = SimpleNamespace(impl=SimpleNamespace(top_k=2, renormalize=True))
    experts = form.experts(layer, gate_up, down)
    x, shares = torch.randn(5, hidden).bfloat16(), torch.rand(5, 2)
    ids = torch.randint(EXPERTS, (5, 2))
    weights = (gate_up.parameter, down.parameter, None, None, None)
    got = experts.forward(x, shares, ids, *weights, act_func=None)
    parts = [
        form.unpack(one.packed, one.rows, one.columns, torch.bfloat16).view(matrices.shape)
        for one, matrices in ((gate_up, plain), (down, plain_down))
    ]
    want = ops.fused_moe(x, *parts, shares, ids, 2, True)
    error = (got - want).float().norm() / want.float().norm()
    assert error < 0.03
    with pytest.raises(AssertionError, match="not packed"):
        experts.forward(x, shares, ids, *weights[:2], torch.zeros(1), None, None, act_func=None)


class Peak(TorchDispatchMode):
    """Measures the most bytes that the results of ops had at any time, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._sizes = 0, dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {ref.cdata for ref in self._sizes}
        given = {
            StorageWeakRef(x.untyped_storage()).cdata for x in tree_leaves(args) if isinstance(x, Tensor)
        }
        for tensor in tree_leaves(out):
            ref = StorageWeakRef(tensor.untyped_storage()) if isinstance(tensor, Tensor) else None
            if ref is not None and ref.cdata not in known | given:
                self._sizes[ref] = tensor.untyped_storage().nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.bits)
def test_packed_experts_are_in_memory_once(form: Form) -> None:
    plain = torch.randn(512, ROWS, COLUMNS)
    with Peak() as memory:
        packed = form.pack(plain, "experts")
    size = sum(part.nbytes for part in packed)
    assert size <= memory.peak < 1.5 * size  # an expert is packed in 64-bit numbers
    for expert in (0, 100, 511):
        alone = form.pack(plain[expert], "an expert")
        assert all(torch.equal(part[expert], own) for part, own in zip(packed, alone, strict=True))


def test_int4_leaves_sizes_that_make_no_whole_words() -> None:
    assert few_bits.Int4().of(100).least_bytes(8, 100) is None
    assert few_bits.Int4().of(96).least_bytes(12, 96) is None
    assert few_bits.Int4().of(96, 40).group_size == 8
    weight, plain = loaded(few_bits.Int4().of(100), 8, 100)
    assert not weight.is_packed
    assert torch.equal(weight.parameter.data, plain)


def test_values_that_are_not_finite_are_refused_by_name() -> None:
    weight, _ = loaded(few_bits.Int8(), ROWS, COLUMNS)
    weight.unpack()
    bad = torch.full((ROWS // 2, COLUMNS), float("nan"))
    with pytest.raises(UnsupportedFeatureError, match=r"DLINFER_CPU_WEIGHTS=int8 for a layer.*NaN"):
        weight.parameter.weight_loader(weight.parameter, bad, 0)


@pytest.mark.parametrize(
    ("name", "admitted"),
    [
        ("model.layers.0.self_attn.qkv_proj", True),
        ("language_model.model.layers.11.mlp.gate_up_proj", True),
        ("transformer.encoder.layers.1.mlp.dense_h_to_4h", True),
        ("model.language_model.layers.2.linear_attn.out_proj", True),
        ("model.layers.0.mlp.gate", False),
        ("language_model.layers.0.mlp.shared_expert_gate", False),
        ("lm_head", False),
        ("visual.blocks.0.attn.qkv", False),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", False),
        ("model.vision.transformer.layers.0.mlp.fc1", False),
        ("audio_tower.layers.0.fc1", False),
        ("multi_modal_projector.linear_1", False),
    ],
)
def test_only_the_language_model_is_rounded(name: str, admitted: bool) -> None:
    assert few_bits.Int8().admits(name) == admitted
