"""Checkpoints of GPTQ and compressed-tensors on their way into LMDeploy's layers: what they mean stays the same."""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.config import ModelConfig, QuantizationConfig, _patch_quantization_config
from lmdeploy.pytorch.weight_loader.model_weight_loader import ModelWeightLoader
from safetensors.torch import save_file
from torch import Tensor

from dlinfer import settings
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model.quantisation import W8A8_SERVED
from dlinfer.framework.lmdeploy_ext.checks.model.support import check_support
from dlinfer.framework.lmdeploy_ext.conversion.loading import plan_of_folder, rewrite
from dlinfer.framework.lmdeploy_ext.conversion.plan import plan_of
from dlinfer.ops.quantised.packing import AWQ
from tests.framework.lmdeploy_ext.conversion.conversion_files import (
    BLOCKS,
    FP8,
    FP8_INPUTS,
    GPTQ,
    INT4,
    INT8,
    INT8_INPUTS,
    OF_BLOCKS,
    PACKED,
    STATIC,
    compressed,
    gptq,
    packed,
    words,
)

BLOCKED = compressed("float-quantized", FP8 | BLOCKS, FP8_INPUTS | OF_BLOCKS)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


@pytest.fixture(autouse=True)
def on_cpu():
    PytorchEngineConfig(device_type="cpu")
    torch.manual_seed(0)


class Layer(torch.nn.Module):
    """What a conversion asks of LMDeploy's linear layers."""

    def __init__(self, in_features: int, group_size: int = 0) -> None:
        super().__init__()
        self.in_features, self.bias = in_features, None
        if group_size:
            self.group_size = group_size
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)


class Model(torch.nn.Module):
    """Gathers what LMDeploy's loader hands to a model."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj"]}

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}
        for name, layer in layers.items():
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded |= dict(weights)


def load(
    folder: Path, config: dict[str, Any], files: list[dict[str, Tensor]], model: Model
) -> dict[str, Tensor]:
    """What a model is given of a folder with so many files."""
    names = [f"model-{number}.safetensors" for number in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(SIZES | {"quantization_config": config}))
    ModelWeightLoader(str(folder)).load_model_weights(model)
    return model.loaded


def meaning(loaded: dict[str, Tensor], name: str, group: int) -> Tensor:
    """The weight [in, out] of an AWQ layer in float64."""
    qweight, scales, qzeros = (loaded[f"{name}.{part}"] for part in ("qweight", "scales", "qzeros"))
    return AWQ.of_groups(group).dequantise(qweight, scales, qzeros, torch.float64)


def group_size(config: dict[str, Any]) -> int:
    """Of the layers that LMDeploy builds."""
    plan = plan_of(config, SIZES)
    assert plan is not None and plan.config is not None
    return plan.config["group_size"]


# --- 4 bits

GROUPS = [(32, 32), (64, 32), (128, 32), (-1, 32), (48, 16)]
"""(as stored, as LMDeploy's layers have them) where layers have 64 and 160 inputs."""


@pytest.mark.parametrize("out", [8, 40])
@pytest.mark.parametrize(("stored", "group"), GROUPS)
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq(tmp_path, layout, stored, group, out):
    config = GPTQ | {"group_size": stored, "checkpoint_format": layout}
    lacking = 1 if layout == "gptq" else 0
    narrow, meant = gptq("q_proj", 64, out, stored, lacking)
    wide, meant_wide = gptq("down", 160, out, stored, lacking)
    model = Model(qkv_proj=Layer(64, group), down=Layer(160, group))
    # A layer's parts may lie in two files.
    first = {name: tensor for name, tensor in (narrow | wide).items() if name.endswith("qweight")}
    rest = {name: tensor for name, tensor in (narrow | wide).items() if name not in first}
    loaded = load(tmp_path, config, [first, rest | {"norm.weight": torch.ones(3)}], model)
    assert group_size(config) == group
    assert torch.equal(meaning(loaded, "q_proj", group), meant)
    assert torch.equal(meaning(loaded, "down", group), meant_wide)
    assert loaded.keys() == {
        "norm.weight",
        *(f"{name}.{part}" for name in ("q_proj", "down") for part in ("qweight", "scales", "qzeros")),
    }
    assert all(
        tensor.dtype in (torch.int32, torch.float16) for name, tensor in loaded.items() if "norm" not in name
    )


@pytest.mark.parametrize("out", [8, 40])
@pytest.mark.parametrize(("stored", "group"), GROUPS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized(tmp_path, symmetric, stored, group, out):
    scheme = INT4 | {"group_size": stored, "symmetric": symmetric}
    config = compressed(
        "pack-quantized", scheme if stored > 0 else scheme | {"strategy": "channel", "group_size": None}
    )
    narrow, meant = packed("k_proj", 64, out, stored, symmetric)
    wide, meant_wide = packed("down", 160, out, stored, symmetric)
    loaded = load(tmp_path, config, [narrow, wide], Model(qkv_proj=Layer(64, group), down=Layer(160, group)))
    assert group_size(config) == group
    assert torch.equal(meaning(loaded, "k_proj", group), meant)
    assert torch.equal(meaning(loaded, "down", group), meant_wide)
    assert {name.partition(".")[2] for name in loaded} == {"qweight", "scales", "qzeros"}


def test_a_bias_of_zeros_that_the_model_has_not_is_left_out(tmp_path):
    tensors, _ = gptq("q_proj", 64, 8, 32, bias=1)
    other, _ = gptq("down", 160, 8, 32)
    model = Model(q_proj=Layer(64, 32), down=Layer(160, 32))
    model.get_submodule("down").bias = torch.nn.Parameter(torch.ones(8))  # pyright: ignore[reportAttributeAccessIssue]
    biases = {"q_proj.bias": torch.zeros(8), "down.bias": torch.zeros(8)}
    loaded = load(tmp_path, GPTQ, [tensors | other | biases], model)
    assert "q_proj.bias" not in loaded
    assert torch.equal(loaded["down.bias"], torch.zeros(8))


def refused_while_loading(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], named: str
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=named):
        load(folder, config, [tensors], Model(q_proj=Layer(64, 32)))


def test_an_order_of_inputs_is_refused_as_it_is_read(tmp_path):
    tensors, _ = gptq("q_proj", 64, 8, 32, g_idx=torch.arange(64).int() // 32 ^ 1)
    refused_while_loading(tmp_path, GPTQ, tensors, "gptq with desc_act, which groups the inputs of q_proj")
    tensors, _ = packed("q_proj", 64, 8, 32)
    order = {"q_proj.weight_g_idx": torch.randperm(64).int() // 32}
    refused_while_loading(tmp_path, PACKED, tensors | order, "the inputs of q_proj")


def test_an_order_that_is_none_is_taken(tmp_path):
    for g_idx in (torch.arange(64).int() // 32, torch.empty(0).int()):
        tensors, meant = gptq("q_proj", 64, 8, 32, g_idx=g_idx)
        loaded = load(tmp_path, GPTQ, [tensors], Model(q_proj=Layer(64, 32)))
        assert torch.equal(meaning(loaded, "q_proj", 32), meant)


_NO_FLOAT16 = r"scales of q_proj that float16 cannot hold \(too large or too small\)"


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        *((scale, torch.bfloat16) for scale in (1e-9, -1e-9, 1.3e-7, 1e5)),
        *((scale, torch.float32) for scale in (1e-9, -1e-9, 5.9e-5, 1e5, float("nan"))),
    ],
)
def test_scales_that_float16_would_change_much_are_refused(tmp_path, scale, dtype):
    scales = torch.ones(2, 8).to(dtype)
    scales[1, 3] = scale
    tensors, _ = gptq("q_proj", 64, 8, 32, scales=scales)
    refused_while_loading(tmp_path, GPTQ, tensors, f"{_NO_FLOAT16}.* Next step: use")


def test_scales_that_float16_holds_are_taken(tmp_path):
    tiny = torch.finfo(torch.float16).smallest_normal
    scales = torch.tensor([0.0, tiny, 1.0001 * tiny, 65504.0, 2.0**-24, 2.0**-20, 1e-3, 0.1]).repeat(2, 1)
    tensors, _ = gptq("q_proj", 64, 8, 32, scales=scales)
    loaded = load(tmp_path, GPTQ, [tensors], Model(q_proj=Layer(64, 32)))
    torch.testing.assert_close(loaded["q_proj.scales"].float(), scales, rtol=2**-11, atol=0)
    for stored in (torch.full((2, 8), 3e-7).half(), torch.full((2, 8), 1e-5).half()):
        tensors, _ = gptq("q_proj", 64, 8, 32, scales=stored)
        loaded = load(tmp_path, GPTQ, [tensors], Model(q_proj=Layer(64, 32)))
        assert torch.equal(loaded["q_proj.scales"], stored)


def test_numbers_that_the_target_cannot_hold_are_refused(tmp_path):
    tensors, _ = gptq("q_proj", 64, 8, 32, qzeros=words(torch.full((2, 8), 15), 1))
    refused_while_loading(tmp_path, GPTQ, tensors, "a zero point of q_proj")
    tensors, _ = gptq("q_proj", 64, 8, 32, scales=torch.full((2, 8), 1e6))
    refused_while_loading(tmp_path, GPTQ, tensors, _NO_FLOAT16)
    tensors, _ = gptq("q_proj", 64, 8, 32, scales=torch.ones(3, 8))
    refused_while_loading(tmp_path, GPTQ, tensors, "3 groups of 32 inputs in q_proj, which has 64")
    tensors, _ = gptq("other", 64, 8, 32)
    refused_while_loading(tmp_path, GPTQ, tensors, "a layer other")


def test_a_layer_in_floats_is_refused_as_it_is_read(tmp_path):
    for config in (GPTQ, PACKED, compressed("int-quantized", INT8, INT8_INPUTS)):
        refused_while_loading(
            tmp_path, config, {"q_proj.weight": torch.ones(8, 64)}, r"not packed \(q_proj\)"
        )


def test_a_router_in_8_bits_is_refused_as_it_is_read(tmp_path):
    scale = {"model.layers.0.mlp.gate.weight_scale": torch.ones(4, 1)}
    for config in (compressed("int-quantized", INT8, INT8_INPUTS), BLOCKED):
        refused_while_loading(tmp_path, config, scale, "with model.layers.0.mlp.gate quantised")


# --- 8 bits


def test_8_bits_keep_their_numbers(tmp_path):
    numbers, scale = torch.randint(-127, 128, (24, 64)).to(torch.int8), torch.rand(24, 1).bfloat16()
    config = compressed("int-quantized", INT8, INT8_INPUTS)
    loaded = load(tmp_path, config, [{"q_proj.weight": numbers, "q_proj.weight_scale": scale}], Model())
    assert loaded.keys() == {"q_proj.weight", "q_proj.scale"}
    assert torch.equal(loaded["q_proj.weight"], numbers)
    assert torch.equal(loaded["q_proj.scale"], scale.float())
    config = compressed("float-quantized", FP8 | BLOCKS, FP8_INPUTS | OF_BLOCKS)
    loaded = load(tmp_path, config, [{"q_proj.weight_scale": scale}], Model())
    assert torch.equal(loaded["q_proj.weight_scale_inv"], scale.float())


def test_zero_points_of_8_bits_are_left_out_where_they_are_0(tmp_path):
    zero = torch.zeros(8, 1, dtype=torch.int8)
    fixed = compressed("float-quantized", FP8 | STATIC, FP8_INPUTS | STATIC)
    for config, part in ((compressed("int-quantized", INT8, INT8_INPUTS), "weight"), (fixed, "input")):
        name = f"q_proj.{part}_zero_point"
        assert load(tmp_path, config, [{name: zero}], Model(q_proj=Layer(64))) == {}
        refused_while_loading(tmp_path, config, {name: zero + 1}, f"with zero points in {name}")


def test_fixed_scales_of_inputs_that_layers_share(tmp_path):
    config = compressed("float-quantized", FP8 | STATIC, FP8_INPUTS | STATIC)
    names = ("q_proj.input_scale", "k_proj.input_scale", "down.input_scale")
    model = Model(qkv_proj=Layer(64), down=Layer(160))
    given = [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.25])]
    assert load(tmp_path, config, [dict(zip(names, given, strict=True))], model).keys() == set(names)
    given[1] = torch.tensor([0.25])
    with pytest.raises(
        UnsupportedFeatureError, match=r"input that [qk]_proj.input_scale and the layers joined with it share"
    ):
        load(tmp_path, config, [dict(zip(names, given, strict=True))], model)


# --- configurations


@pytest.mark.parametrize("empty", [None, {}])
def test_an_empty_configuration_is_as_none(tmp_path, empty):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "quantization_config": empty}
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    hf_config = _patch_quantization_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert not hasattr(hf_config, "quantization_config")
    ModelConfig.from_hf_config(hf_config, dtype="float32", device_type="cpu")
    assert QuantizationConfig.from_config(hf_config).quant_method is None
    assert plan_of_folder(tmp_path) is None
    with settings.override(cpu_weights="int8"):
        plan = plan_of_folder(tmp_path)
        assert plan is not None and plan.packs
    hf_config.quantization_config = empty
    with pytest.raises(UnsupportedFeatureError, match="a model that is not quantised"):
        _patch_quantization_config(hf_config, "awq")


def test_an_empty_configuration_inside_another_is_as_none():
    inner = transformers.LlamaConfig()
    setattr(inner, "quantization_config", {})  # noqa: B010 - transformers declares no such field
    config = SimpleNamespace(text_config=inner, quantization_config=None, to_dict=dict)
    rewrite(config)
    assert not hasattr(config, "quantization_config") and not hasattr(inner, "quantization_config")


def served(config: dict[str, Any], name: str = "LlamaForCausalLM", **sizes: Any) -> dict[str, Any]:
    return {"architectures": [name], "quantization_config": config} | SIZES | sizes


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (GPTQ, "awq"),
        (GPTQ | {"checkpoint_format": "gptq_v2", "sym": True, "group_size": -1}, "awq"),
        (
            GPTQ
            | {
                "modules_in_block_to_quantize": [
                    [f"self_attn.{n}_proj" for n in "qkvo"],
                    ["mlp.gate_proj"],
                    ["mlp.up_proj", "mlp.down_proj"],
                ]
            },
            "awq",
        ),
        (PACKED, "awq"),
        (
            compressed(
                "pack-quantized", INT4 | {"actorder": "static"}, ignore=["re:.*lm_head", "re:.*vision.*"]
            ),
            "awq",
        ),
        (compressed("int-quantized", INT8, INT8_INPUTS), "smooth_quant"),
        (compressed("float-quantized", FP8, FP8_INPUTS), "smooth_quant"),
        (compressed("float-quantized", FP8 | STATIC, FP8_INPUTS | STATIC), "fp8"),
        (compressed("float-quantized", FP8, FP8_INPUTS | STATIC), "fp8"),
        (compressed("naive-quantized", *[{"num_bits": 8, "strategy": "tensor", "type": "float"}] * 2), "fp8"),
        (compressed("naive-quantized", INT8, INT8_INPUTS, quantization_status="frozen"), "smooth_quant"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_taken(config, method, dtype):
    check_support(served(config))
    fields: dict[str, Any] = {"dtype": "bfloat16", "quantization_config": config}
    hf_config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **fields, **SIZES)
    hf_config = _patch_quantization_config(hf_config, config["quant_method"])
    found = ModelConfig.from_hf_config(hf_config, dtype=dtype, device_type="cpu")
    assert QuantizationConfig.from_config(hf_config).quant_method == method
    assert found.dtype is (torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))


def test_blocks_are_taken_where_they_are_whole():
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    check_support(served(BLOCKED, **sizes))
    with pytest.raises(
        UnsupportedFeatureError, match="compressed-tensors float-quantized in blocks of 128, but"
    ):
        check_support(served(BLOCKED))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (served(GPTQ | {"bits": 8}), "gptq of 8 bits"),
    (served(GPTQ | {"desc_act": True}), "gptq with desc_act"),
    (served(GPTQ | {"checkpoint_format": "marlin"}), "gptq in the layout 'marlin'"),
    (served(GPTQ | {"is_marlin_format": True}), "gptq in the layout 'marlin'"),
    (served(GPTQ | {"pack_dtype": "int16"}), "gptq packed in int16"),
    (served(GPTQ | {"lm_head": True}), "gptq with lm_head"),
    (served(GPTQ | {"dynamic": {"-:.*down.*": {}}}), "dynamic"),
    (served(GPTQ | {"modules_in_block_to_quantize": ["self_attn.q_proj"]}), "not packed .down_proj"),
    (served(GPTQ | {"group_size": 0}), "gptq in groups of 0"),
    (served(GPTQ | {"group_size": None}), "gptq in groups of None"),
    (served(GPTQ, num_experts=4), "gptq with experts"),
    (served(GPTQ, kv_lora_rank=4), "gptq with latent attention"),
    (served(GPTQ, vision_config={"depth": 1}), "vision-language"),
    (served(GPTQ, intermediate_size=100), "intermediate_size = 100 is not a multiple of 8"),
    (served(GPTQ | {"group_size": 20}), "in groups of 20 inputs, which do not fit its sizes"),
    (served(GPTQ, num_key_value_heads=1, head_dim=20, num_attention_heads=2), "head_dim = 20"),
    (served(compressed("nvfp4-pack-quantized", INT4)), "nvfp4-pack-quantized"),
    (served(compressed("pack-quantized", INT4 | {"num_bits": 8})), "num_bits=8"),
    (served(compressed("pack-quantized", INT4 | {"actorder": "group"})), "actorder group"),
    (served(compressed("pack-quantized", INT4 | {"strategy": "tensor"})), "strategy=tensor"),
    (served(compressed("pack-quantized", INT4, INT8_INPUTS)), "with inputs num_bits=8"),
    (served(PACKED | {"quantization_status": "calibration"}), "quantization_status calibration"),
    (served(PACKED | {"kv_cache_scheme": {"num_bits": 8}}), "quantised KV cache"),
    (served(PACKED | {"transform_config": {"config_groups": {"u": {}}}}), "transforms"),
    (served(PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}), "sparse-24-bitmask"),
    (served(PACKED | {"config_groups": {}}), "with 0 config_groups"),
    (served(PACKED | {"ignore": []}), "with lm_head quantised"),
    (served(PACKED | {"ignore": ["lm_head", "model.layers.1.mlp.down_proj"]}), "layers.1.mlp.down_proj"),
    (served(PACKED | {"ignore": ["re:.*lm_head", "re:.*layers.1.mlp.*"]}), "layers.1.mlp.gate_proj"),
    (served(compressed("int-quantized", INT8 | {"strategy": "tensor"}, INT8_INPUTS)), "weights num_bits=8"),
    (served(compressed("int-quantized", INT8, INT8_INPUTS | STATIC)), "inputs num_bits=8"),
    (served(compressed("int-quantized", INT8, INT8_INPUTS | {"symmetric": False})), "symmetric=False"),
    (
        served(compressed("int-quantized", INT8, INT8_INPUTS), "Gemma2ForCausalLM"),
        "int-quantized; supported are",
    ),
    (served(compressed("float-quantized", FP8 | {"strategy": "tensor"}, FP8_INPUTS)), "strategy=tensor"),
    (served(compressed("float-quantized", FP8)), "with inputs none"),
    (served(compressed("naive-quantized", INT4)), "naive-quantized with weights num_bits=4"),
    (served(compressed("float-quantized", FP8, FP8_INPUTS | STATIC), num_experts=4), "with experts"),
    (served(PACKED, num_local_experts=4), "pack-quantized with experts"),
    (served(PACKED | {"ignore": ["lm_head", "re:.*experts.*"]}), "mlp.experts.0.gate_proj"),
]


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_refused_by_name(config, named):
    with pytest.raises(UnsupportedFeatureError, match=named) as caught:
        check_support(config)
    assert "Next step:" in str(caught.value)


@pytest.mark.parametrize("name", W8A8_SERVED)
def test_the_classes_of_activations_in_8_bits(name):
    rules = ["lm_head", "re:.*mlp.gate$", "model.layers.0.mlp.shared_expert_gate"]
    config = compressed("int-quantized", INT8, INT8_INPUTS, ignore=rules)
    check_support(served(config, name, num_experts=4 if "Mo" in name else None))
