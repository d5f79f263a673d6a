"""Faults put into lowerings, each of which has to be caught.

By torch, the vendor's Meta kernels or torchair while the graph is written (``front end``), by the interpreter where the
documents tell or a result is not what was noted of it (``documents``), or by comparison with the reference
(``numbers``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dlinfer.errors import EngineResultError, GraphFallbackError, GraphRunError
from tests.vendor.ascend.graph import compiling, latent_models, models

Change = Callable[[list[Any], dict[str, Any]], Any]


@dataclass(frozen=True)
class Fault:
    """name: what is wrong. op: of the vendor's, whose calls are spoiled. change: spoils (args, kwargs) in place.

    results: spoils what it gives. model: which calls it.
    """

    name: str
    op: str
    caught: str
    change: Change = lambda args, kwargs: None
    results: Callable[[Any], Any] = lambda found: found
    model: str = "decoder"


def at(place: int | str, value: Callable[[Any], Any]) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        given: Any = kwargs if isinstance(place, str) else args
        given[place] = value(given[place])

    return change


def put(**values: Any) -> Change:
    return lambda args, kwargs: kwargs.update(values)


def swap(one: int, other: int) -> Change:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        args[one], args[other] = args[other], args[one]

    return change


def drop(name: str) -> Change:
    return lambda args, kwargs: kwargs.pop(name)


NORM, ROTARY, SCATTER = (
    "npu::npu_add_rms_norm",
    "npu::npu_apply_rotary_pos_emb",
    "npu::npu_scatter_pa_kv_cache_functional",
)
FIA, GATED, ROUTE = "air::npu_fused_infer_attention_score", "npu::npu_swiglu", "npu::npu_moe_init_routing_v2"
GROUPED, GATING = "npu::npu_grouped_matmul", "npu::npu_moe_gating_top_k_softmax"
QUANT, PRODUCT = "npu::npu_dynamic_quant", "npu::npu_quant_matmul"
LATENT, WRITE = "air::npu_fused_infer_attention_score_v2", "npu::npu_scatter_nd_update"

FAULTS = [
    Fault("another epsilon", NORM, "numbers", at(3, lambda eps: 0.5)),
    Fault("x of float32", NORM, "documents", at(0, lambda x: x.float())),
    Fault("gamma of float32", NORM, "documents", at(2, lambda x: x.float())),
    Fault("the sum for the norm", NORM, "numbers", results=lambda found: (found[2], found[1], found[0])),
    Fault("an unknown keyword", NORM, "front end", put(eps=1e-5)),
    Fault("halves of tokens", GATED, "front end", at(1, lambda dim: 0)),
    Fault("gate and up exchanged", GATED, "numbers", at(0, lambda x: torch.cat(x.chunk(2, -1)[::-1], -1))),
    Fault("another layout", ROTARY, "documents", at(4, lambda layout: "BSND")),
    Fault("an unknown layout", ROTARY, "front end", at(4, lambda layout: "DNT")),
    Fault("another rotation", ROTARY, "documents", at(5, lambda mode: "interleave")),
    Fault("cos and sin exchanged", ROTARY, "numbers", swap(2, 3)),
    Fault("keys rotated for queries", ROTARY, "documents", swap(0, 1)),
    Fault("sin of float32", ROTARY, "documents", at(3, lambda x: x.float())),
    Fault("caches as NZ", SCATTER, "documents", put(cache_mode="PA_NZ")),
    Fault("the default cache mode", SCATTER, "documents", drop("cache_mode")),
    Fault("keys and values exchanged", SCATTER, "numbers", swap(0, 1)),
    Fault("caches exchanged", SCATTER, "numbers", swap(2, 3)),
    Fault("slots as floats", SCATTER, "documents", at(4, lambda x: x.float())),
    Fault("slots one too far", SCATTER, "numbers", at(4, lambda x: x + 1)),
    Fault("no scale", FIA, "numbers", drop("scale")),
    Fault("keys for all heads", FIA, "documents", put(num_key_value_heads=models.HEADS)),
    Fault("another number of heads", FIA, "documents", put(num_heads=2)),
    Fault("another block size", FIA, "documents", put(block_size=64)),
    Fault("another layout of queries", FIA, "documents", put(input_layout="BNSD")),
    Fault("a block table of int64", FIA, "documents", at("block_table", lambda x: x.long())),
    Fault("no lengths", FIA, "documents", drop("actual_seq_lengths_kv")),
    Fault("one key too few", FIA, "numbers", at("actual_seq_lengths_kv", lambda x: (x - 1).clamp(min=1))),
    Fault("lengths of padding", FIA, "documents", at("actual_seq_lengths_kv", lambda x: x - (x == 1).long())),
    Fault("keys and values of attention exchanged", FIA, "numbers", swap(1, 2)),
    Fault("another dtype of queries", FIA, "documents", at(0, lambda x: x.bfloat16())),
    Fault("no triangle", FIA, "documents", drop("atten_mask"), model="prompt"),
    Fault("a triangle turned over", FIA, "documents", at("atten_mask", lambda x: x.t()), model="prompt"),
    Fault("each key is seen", FIA, "documents", put(sparse_mode=0), model="prompt"),
    Fault("another mode of a mask", FIA, "documents", put(sparse_mode=2), model="prompt"),
    Fault("a window", FIA, "numbers", put(sparse_mode=4, pre_tokens=3, next_tokens=0), model="prompt"),
    Fault("scatter indices", ROUTE, "numbers", put(row_idx_type=1), model="experts"),
    Fault("ends for counts", ROUTE, "documents", put(expert_tokens_num_type=0), model="experts"),
    Fault("an expert too few", ROUTE, "documents", put(active_expert_range=[0, 7]), model="experts"),
    Fault("experts of int64", ROUTE, "documents", at(1, lambda x: x.long()), model="experts"),
    Fault("counts taken for ends", GROUPED, "documents", put(group_list_type=0), model="experts"),
    Fault("one result a group", GROUPED, "front end", put(split_item=0), model="experts"),
    Fault("groups of columns", GROUPED, "front end", put(group_type=1), model="experts"),
    Fault("one expert more", GATING, "front end", at(2, lambda k: k + 1), model="experts"),
    Fault("another dtype of numbers", QUANT, "documents", put(dst_type=torch.uint8), model="eight bits"),
    Fault("no scales of tokens", PRODUCT, "numbers", drop("pertoken_scale"), model="eight bits"),
    Fault("scales of float16", PRODUCT, "documents", at(2, lambda x: x.half()), model="eight bits"),
    Fault(
        "another dtype of the product",
        PRODUCT,
        "documents",
        put(output_dtype=torch.bfloat16),
        model="eight bits",
    ),
    Fault("no rotated numbers", LATENT, "numbers", put(query_rope=None, key_rope=None), model="latent"),
    Fault("no scale", LATENT, "numbers", drop("softmax_scale"), model="latent"),
    Fault("another block size", LATENT, "documents", put(block_size=64), model="latent"),
    Fault("another number of heads", LATENT, "documents", put(num_query_heads=2), model="latent"),
    Fault(
        "one key too few",
        LATENT,
        "numbers",
        at("actual_seq_kvlen", lambda x: (x - 1).clamp(min=1)),
        model="latent",
    ),
    Fault(
        "a block table of int64", LATENT, "documents", at("block_table", lambda x: x.long()), model="latent"
    ),
    Fault("pages one too far", LATENT, "numbers", at("block_table", lambda x: x + 1), model="latent"),
    Fault("updates twice as large", WRITE, "numbers", at(2, lambda x: x + x), model="latent"),
    Fault("places one too far", WRITE, "documents", at(1, lambda x: x + 1), model="latent"),
    Fault("updates of float32", WRITE, "documents", at(2, lambda x: x.float()), model="latent"),
]


def case(name: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    if name == "prompt":
        return models.Prompt(paged=True).half(), models.prompt(5, 100, torch.float16)
    if name == "experts":
        return models.Experts(torch.Generator().manual_seed(0)).half(), models.inputs(1, [5, 129, 1])[:1]
    if name == "eight bits":
        model = models.EightBit().half()
        model.scale = model.scale.float()
        return model, models.inputs(1, [5, 129, 1])[:1]
    if name == "latent":
        return latent_models.LatentAttention(1).half(), latent_models.inputs(1, [5, 129, 0, 1])
    return models.Decoder(1).half(), models.inputs(1, [5, 129, 0, 1])


def caught(name: str) -> str:
    """How the model's graph is found to be wrong; empty where it is right."""
    torch._dynamo.reset()
    model, inputs = case(name)
    if name == "eight bits":  # eagerly, since a rounding to 8 bits may differ by one from float64's
        with torch.no_grad():
            wanted, written = model(*inputs), inputs
    else:
        wanted, written = compiling.reference(model, inputs)
    try:
        with torch.no_grad():
            found = compiling.compiled(model, (), inputs)(*inputs)
    except GraphFallbackError:
        return "front end"
    except GraphRunError as error:
        if "the interpreter does not know" in str(error):  # that would be no finding
            raise
        return "documents"
    except EngineResultError:  # what the graph gives is not what the region gives
        return "documents"
    try:
        for one, other in zip((found, *inputs), (wanted, *written), strict=True):
            compiling.close(one, other, torch.float16)
    except AssertionError:
        return "numbers"
    return ""


@pytest.mark.parametrize("model", ["decoder", "prompt", "experts", "eight bits", "latent"])
def test_without_a_fault_nothing_is_caught(model):
    assert caught(model) == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op.partition('npu_')[2]}-{fault.name}")
def test_each_fault_is_caught(fault, monkeypatch):
    space, name = fault.op.split("::")
    room = getattr(torch.ops, space)
    real, spoiled = getattr(room, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        fault.change(given, kwargs)
        spoiled.append(name)
        return fault.results(real(*given, **kwargs))

    monkeypatch.setitem(room.__dict__, name, call)
    assert caught(fault.model) == fault.caught
    assert spoiled
