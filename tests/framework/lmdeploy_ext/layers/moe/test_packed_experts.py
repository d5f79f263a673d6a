"""Experts of 4 bits: which checkpoints are taken, what becomes of their tensors, and the layers that LMDeploy makes."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.backends import get_backend
from lmdeploy.pytorch.backends.moe import FusedMoEW4A16BuildSpec
from lmdeploy.pytorch.config import QuantizationConfig
from lmdeploy.pytorch.models import patch as model_patch
from lmdeploy.pytorch.nn.moe import build_fused_moe
from safetensors.torch import load_file
from torch import Tensor, nn

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model.support import check_support
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import CONVERTED_FROM, SERVED
from dlinfer.framework.lmdeploy_ext.conversion.loading import Layers, place_of
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.framework.lmdeploy_ext.layers.moe import packed_experts
from dlinfer.framework.lmdeploy_ext.layers.moe.packed_experts import PackedWeights
from dlinfer.framework.lmdeploy_ext.layers.moe.packed_experts_model import _repack
from dlinfer.framework.lmdeploy_ext.preflight.check import preflight
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.quantised.packing import AWQ
from tests.e2e import packed_experts_model
from tests.framework.lmdeploy_ext.conversion.conversion_files import (
    GPTQ,
    INT4,
    INT8,
    INT8_INPUTS,
    compressed,
    gptq,
    packed,
)

ROUTERS = ["lm_head", "re:.*gate$"]
PACKED = compressed("pack-quantized", INT4, ignore=ROUTERS)
ALONE = compressed("pack-quantized", INT4, ignore=[*ROUTERS, "re:.*self_attn.*"])
NAMED = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
AWQ_CONFIG: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts": 4,
}


@pytest.fixture(autouse=True)
def on_cpu():
    PytorchEngineConfig(device_type="cpu")
    torch.manual_seed(0)


def served(config: dict[str, Any], name: str = "Qwen3MoeForCausalLM", **more: Any) -> dict[str, Any]:
    return {"architectures": [name], "quantization_config": config} | SIZES | more


# --- configurations


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(
    "config",
    [
        AWQ_CONFIG,
        AWQ_CONFIG | {"modules_to_not_convert": ["gate", "mlp.shared_expert_gate"]},
        GPTQ,
        GPTQ | {"dynamic": {"-:.*mlp.gate$": {}, "-:lm_head": {}}},
        GPTQ
        | {
            "modules_in_block_to_quantize": [
                [f"self_attn.{n}_proj" for n in "qkvo"],
                ["e.w1", "e.w2", "e.w3"],
            ]
        },
        PACKED,
        compressed("pack-quantized", INT4 | {"group_size": 96}, ignore=ROUTERS),
    ],
    ids=str,
)
def test_taken(name, config):
    check_support(served(config, name))


@pytest.mark.parametrize(
    "ignore", [ALONE["ignore"], [*ROUTERS, *NAMED], [*ROUTERS, "re:.*attn", "re:.*shared.*"]]
)
def test_experts_alone_are_taken_as_lmdeploy_reads_them(ignore):
    config = ALONE | {"ignore": ignore}
    check_support(served(config))
    plan = plan_of(config, served(config))
    assert plan is not None and plan.config is not None
    read = QuantizationConfig.from_config(SimpleNamespace(quantization_config=plan.config))
    assert (read.quant_method, read.bits, read.group_size) == ("compressed-tensors", 4, 32)
    method = read.get_quant_method
    assert method("model.layers.1.mlp.experts", "moe") == "compressed-tensors"
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert method(f"model.layers.1.{name}") is None
    assert plan_of(plan.config, served(plan.config)) is None  # nothing is left to do
    check_support(served(plan.config))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        served(AWQ_CONFIG, "DeepseekForCausalLM"),
        "AWQ model with experts of DeepseekForCausalLM; supported are",
    ),
    (served(GPTQ, "Glm4MoeForCausalLM"), "gptq with experts of Glm4MoeForCausalLM; supported are Mixtral"),
    (served(PACKED, "DeepseekForCausalLM"), "pack-quantized with experts of DeepseekForCausalLM"),
    (
        served(ALONE, "MixtralForCausalLM"),
        "MixtralForCausalLM .compressed-tensors pack-quantized with only the experts quantised",
    ),
    (
        served(AWQ_CONFIG, moe_intermediate_size=80),
        "moe_intermediate_size=80 is not a multiple of group_size=32",
    ),
    (served(AWQ_CONFIG | {"modules_to_not_convert": ["self_attn"]}), "not packed .self_attn"),
    (served(GPTQ | {"dynamic": {"-:.*experts.*": {}}}), "dynamic: -:.*experts"),
    (served(GPTQ | {"dynamic": {"+:.*gate$": {"bits": 8}}}), "dynamic"),
    (served(GPTQ | {"dynamic": {"-:*gate": {}}}), r"dynamic: -:\*gate"),
    (served(GPTQ, moe_intermediate_size=100), "moe_intermediate_size = 100 is not a multiple of 8"),
    (served(ALONE | {"ignore": [*ROUTERS, "re:.*experts.*"]}), "not packed .*experts.0.gate_proj"),
    (served(ALONE | {"ignore": [*ROUTERS, "re:.*q_proj"]}), "not packed .*q_proj"),
    (served(ALONE | {"ignore": ["re:.*gate$", *NAMED]}), "with lm_head quantised"),
    (served(ALONE, mlp_only_layers=[0]), "not packed .*self_attn.q_proj"),
    (
        served(ALONE, moe_intermediate_size=80),
        "quantised, whose moe_intermediate_size = 80 is not a multiple of 32",
    ),
    (
        served(compressed("pack-quantized", INT4 | {"symmetric": False}, ignore=ALONE["ignore"])),
        "with only the experts quantised, with zero points",
    ),
    (
        served(compressed("pack-quantized", INT4 | {"group_size": 16}, ignore=ALONE["ignore"])),
        "with only the experts quantised, in groups of 16",
    ),
    (
        served(compressed("int-quantized", INT8, INT8_INPUTS, ignore=ALONE["ignore"]), "Qwen2MoeForCausalLM"),
        "int-quantized with layers that are not packed",
    ),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_refused_by_name(config, named):
    with pytest.raises(UnsupportedFeatureError, match=named) as caught:
        check_support(config)
    assert "Next step:" in str(caught.value)


# --- tensors


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("model.layers.0.mlp.experts.7.up_proj", "model.layers.0.mlp.experts.gate_up"),
        ("model.layers.0.mlp.experts.7.down_proj", "model.layers.0.mlp.experts.down"),
        ("model.layers.0.block_sparse_moe.experts.11.w3", "model.layers.0.block_sparse_moe.experts.gate_up"),
        ("model.layers.0.block_sparse_moe.experts.11.w2", "model.layers.0.block_sparse_moe.experts.down"),
        ("model.layers.0.mlp.experts.7.norm", "model.layers.0.mlp.experts.7.norm"),
        ("model.layers.0.mlp.shared_expert.up_proj", "model.layers.0.mlp.shared_expert.up_proj"),
    ],
)
def test_where_an_expert_of_a_checkpoint_lies(path, place):
    assert place_of(path) == place


class Experts(nn.Module):
    """Experts of 64 inputs and outputs. inner: this rank's part of the intermediate size."""

    def __init__(self, group_size: int, inner: int = 96) -> None:
        super().__init__()
        self.gate_up: Any = PackedWeights(2, 64, 2 * inner, group_size, None)
        self.down: Any = PackedWeights(2, inner, 64, group_size, None, colwise=False)


class Model(nn.Module):
    """A router and experts as LMDeploy's classes have them."""

    def __init__(self, group_size: int, inner: int) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate, self.mlp.experts = nn.Linear(64, 4), Experts(group_size, inner)


def converted(
    config: dict[str, Any], tensors: dict[str, Tensor], group: int = 32, inner: int = 96
) -> dict[str, Tensor]:
    model = served(config, num_experts=2)
    plan, layers = plan_of(config, model), Layers(Model(group, inner))
    assert plan is not None
    return dict(
        made for name, tensor in tensors.items() for made in plan.convert(name, tensor, layers.of(name))
    )


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (3, 0), (3, 2)])
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("stored", [32, 64, -1])
def test_experts_become_awqs_and_are_loaded_side_by_side(method, stored, ranks, rank, monkeypatch):
    """A rank has a part of gate's, up's and down's 96 rows or columns."""
    monkeypatch.setattr(packed_experts, "get_tp_world_rank", lambda kind: (ranks, rank))
    inner = 96 // ranks
    if method == "gptq":
        config, parts = GPTQ | {"group_size": stored}, gptq
    else:
        scheme: dict[str, Any] = (
            {"strategy": "channel", "group_size": None} if stored < 0 else {"group_size": stored}
        )
        config, parts = compressed("pack-quantized", INT4 | scheme, ignore=ROUTERS), packed
    meant, tensors = {}, {}
    for name, into, out in (("gate_proj", 64, 96), ("up_proj", 64, 96), ("down_proj", 96, 64)):
        more, meant[name] = parts(f"mlp.experts.1.{name}", into, out, stored)
        tensors |= more
    layer = Experts(32, inner)
    for name, tensor in converted(config, tensors, inner=inner).items():
        _, _, expert, projection, part = name.split(".")
        where = getattr(layer.down if projection == "down_proj" else layer.gate_up, part)
        where.weight_loader(where, tensor, expert_id=int(expert), shard_id=projection.removesuffix("_proj"))
    for found, wanted in (
        (
            layer.gate_up,
            torch.cat([meant[f"{part}_proj"].split(inner, 1)[rank] for part in ("gate", "up")], 1),
        ),
        (layer.down, meant["down_proj"].split(inner)[rank]),
    ):
        given = (found.qweight[1], found.scales[1], found.qzeros[1])
        assert torch.equal(AWQ.of_groups(32).dequantise(*given, torch.float64), wanted)


def test_a_bias_of_zeros_that_experts_have_not_is_left_out():
    """AutoGPTQ stores one for every layer it quantises."""
    assert converted(GPTQ, {"mlp.experts.0.up_proj.bias": torch.zeros(96)}) == {}


def test_a_part_of_other_sizes_is_refused():
    part: Any = PackedWeights(2, 64, 2 * 96, 32, None)
    for given in (torch.zeros(1, 96), torch.zeros(2, 192), torch.zeros(4, 96)):
        with pytest.raises(UnsupportedFeatureError, match=r"expert's gate of .* instead of \(2, 96\)"):
            part.weight_loader(part.scales, given.half(), 0, "gate")
    with pytest.raises(UnsupportedFeatureError, match="96 inputs and 64 outputs in groups of 64"):
        PackedWeights(2, 96, 64, 64, None)


@pytest.mark.parametrize("config", [GPTQ, PACKED], ids=["gptq", "compressed-tensors"])
def test_a_packed_router_and_an_expert_in_floats_are_refused_as_they_are_read(config):
    parts, _ = (gptq if config is GPTQ else packed)("mlp.gate", 64, 8, 32)
    for name, tensor in parts.items():
        if name != "mlp.gate.weight_shape":
            with pytest.raises(
                UnsupportedFeatureError, match="gate quantised, which LMDeploy's class builds in floats"
            ):
                converted(config, {name: tensor})
    with pytest.raises(UnsupportedFeatureError, match=r"not packed \(mlp.experts.0.up_proj\)"):
        converted(config, {"mlp.experts.0.up_proj.weight": torch.ones(96, 64)})
    router = {"mlp.gate.weight": torch.ones(4, 64)}
    assert converted(config, router) == router


@pytest.mark.parametrize("stored", [32, 64, -1])
@pytest.mark.parametrize(("name", "into", "out"), [("gate_proj", 64, 96), ("down_proj", 96, 64)])
def test_experts_alone_keep_their_words(stored, name, into, out):
    scheme: dict[str, Any] = (
        {"strategy": "channel", "group_size": None} if stored < 0 else {"group_size": stored}
    )
    config = ALONE | compressed("pack-quantized", INT4 | scheme, ignore=ALONE["ignore"])
    tensors, meant = packed(f"mlp.experts.1.{name}", into, out, stored)
    attention = {"self_attn.q_proj.weight": torch.ones(4, 4)}
    found = converted(config, tensors | attention)
    assert found.keys() == tensors.keys() | attention.keys()
    words, scales, shape = (
        found[f"mlp.experts.1.{name}.weight_{part}"] for part in ("packed", "scale", "shape")
    )
    assert (scales.dtype, shape.dtype, shape.tolist()) == (torch.bfloat16, torch.int32, [out, into])
    assert words is tensors[f"mlp.experts.1.{name}.weight_packed"]
    part = SimpleNamespace(
        weight_packed=nn.Parameter(words[None].clone(), False),
        weight_scale=nn.Parameter(scales[None].clone(), False),
    )
    before = [one.data_ptr() for one in (part.weight_packed, part.weight_scale)]
    for _ in range(2):  # once more changes nothing
        _repack(part)
        widened = AWQ.of_groups(32).dequantise(
            part.weight_packed[0], part.weight_scale[0], None, torch.float64
        )
        assert torch.equal(widened, meant)
    assert [one.data_ptr() for one in (part.weight_packed, part.weight_scale)] == before


def test_experts_of_one_group_keep_their_words():
    """As a rank has them, if its part of the intermediate size is one group."""
    tensors, meant = packed("down_proj", 32, 64, 32)
    part = SimpleNamespace(
        weight_packed=nn.Parameter(tensors["down_proj.weight_packed"][None].clone(), False),
        weight_scale=nn.Parameter(tensors["down_proj.weight_scale"][None].bfloat16(), False),
    )
    _repack(part)
    widened = AWQ.of_groups(32).dequantise(part.weight_packed[0], part.weight_scale[0], None, torch.float64)
    assert torch.equal(widened, meant)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        (
            {"mlp.experts.0.up_proj.weight_scale": torch.full((96, 2), 1 + 2**-10).half()},
            "that bfloat16 cannot represent",
        ),
        ({"mlp.experts.0.up_proj.weight_scale": torch.ones(96, 3)}, "3 groups of 32 inputs"),
        ({"mlp.experts.0.up_proj.weight": torch.ones(96, 64)}, r"not packed \(mlp.experts.0.up_proj\)"),
        (
            {"mlp.experts.0.up_proj.weight_g_idx": torch.arange(64).flip(0) // 32},
            "groups the inputs of mlp.experts.0.up_proj in another order",
        ),
        (
            {"self_attn.q_proj.weight_packed": torch.ones(4, 4).int()},
            "self_attn.q_proj quantised, which its ignore rules",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_experts_alone_is_refused_as_it_is_read(tensors, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        converted(ALONE, tensors)


# --- layers

SPEC = FusedMoEW4A16BuildSpec(
    top_k=2,
    num_experts=4,
    renormalize=True,
    num_bits=4,
    group_size=32,
    hidden_dim=64,
    ep_size=1,
    ep_group=None,
    output_dtype=torch.bfloat16,
    num_max_dispatch_tokens_per_rank=1,
    layer_idx=0,
)


def test_the_layer_calls_the_op():
    sample = next(one for one in ops.fused_moe_w4a16.sample_inputs(SampleMaker(torch.float32)))
    x, gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros, shares, ids, *rest = sample.args
    layer: Any = get_backend("cpu").build_op(dataclasses.replace(SPEC, group_size=rest[-1]))
    got = layer.forward(x, shares, ids, gate_up, gate_up_scales, gate_up_zeros, down, down_scales, down_zeros)
    assert torch.equal(got, ops.fused_moe_w4a16(*sample.args))
    given: Any = (x, gate_up, gate_up_scales, None, down, down_scales, None, shares, ids, *rest)
    symmetric = ops.fused_moe_w4a16(*given)
    weights = (gate_up, gate_up_scales, down, down_scales)
    assert torch.equal(layer.forward(x, shares, ids, *weights), symmetric)


@pytest.mark.parametrize("changes", [{"ep_size": 2}, {"num_bits": 8}], ids=str)
def test_what_no_op_serves_is_refused_as_a_layer_is_built(changes):
    with pytest.raises(UnsupportedFeatureError):
        get_backend("cpu").build_op(dataclasses.replace(SPEC, **changes))


@pytest.mark.parametrize("more", [{"bias": True}, {"act_func": torch.sin}], ids=["bias", "activation"])
def test_experts_with_biases_or_another_activation_are_refused(more, monkeypatch: pytest.MonkeyPatch):
    context = SimpleNamespace(quant_config=QuantizationConfig(quant_method="awq", bits=4, group_size=32))
    monkeypatch.setattr(model_patch, "get_build_model_context", lambda: context)
    with pytest.raises(UnsupportedFeatureError, match="packed experts with biases or an unusual activation"):
        build_fused_moe(64, 96, 4, 2, **more)


@pytest.mark.parametrize("method", ["awq", "experts"])
def test_preflight_tells_of_the_op_and_of_packed_bytes(method, tmp_path):
    packed_experts_model.build("qwen3_moe", method, tmp_path / method)
    report = preflight(tmp_path / method, "cpu", session_len=256, max_batch_size=2)
    assert report.refusals == []
    assert {one.op: one.vendor for one in report.ops}["fused_moe_w4a16"] == "cpu"
    assert report.memory is not None
    files = (tmp_path / method).glob("*.safetensors")
    assert report.memory.weights == sum(one.nbytes for file in files for one in load_file(file).values())


def test_a_converted_configuration_says_what_it_was_made_of():
    for config in (GPTQ, PACKED, ALONE):
        plan = plan_of(config, served(config))
        assert plan is not None and plan.config is not None
        assert plan.config[CONVERTED_FROM].startswith(config["quant_method"])
