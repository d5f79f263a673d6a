"""The check of indices out of range: a call must refuse them with OpArgumentError before it writes anything."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlinfer.conformance.case import Case, Failed, Skipped, bits
from dlinfer.errors import OpArgumentError


def _slots_of_cache(case: Case, args: dict[str, Any]) -> int:
    layout = case.subject.vendor.kv_cache_layout
    return layout.canonical(args["k_cache"])[:, :, 0, 0].numel()


def _states(case: Case, args: dict[str, Any]) -> int:
    name = "conv_state" if "conv_state" in args else "recurrent_state"
    return args[name].shape[0]


# Parameter -> the first number that is out of range. Only ops whose docstring promises a refusal are checked.
_FIRST_OUTSIDE: dict[str, dict[str, Callable[[Case, dict[str, Any]], int]]] = {
    "fill_kv_cache": {"kv_start_indices": _slots_of_cache},
    "fill_quantised_kv_cache": {"kv_start_indices": _slots_of_cache},
    "causal_conv1d": {"state_ids": _states, "q_ends": lambda case, args: args["out"].shape[0] + 1},
    "gated_delta_rule": {"state_ids": _states, "q_ends": lambda case, args: args["out"].shape[0] + 1},
    "embedding_bf12": {"indices": lambda case, args: args["rows"]},
    "embedding_gguf": {"indices": lambda case, args: args["rows"]},
    "fused_moe_gguf": {"topk_ids": lambda case, args: args["gate_up_weights"].shape[0]},
    "fused_moe_bf12": {"topk_ids": lambda case, args: args["num_experts"]},
    "lora_linear": {"adapter_ids": lambda case, args: _length(args)},
}


def _length(args: dict[str, Any]) -> int:
    return next(value for name, value in args.items() if "start" in name).shape[0]


def _bad(case: Case) -> Iterator[tuple[str, list[Any], int]]:
    for name, first in _FIRST_OUTSIDE.get(case.op.name, {}).items():
        for beyond in (0, 1, 2**20):
            args = case.fresh()
            by_name = dict(zip(case.op.parameters, args, strict=True))
            indices: Tensor = by_name[name]
            if indices.numel():
                last = (-1,) * indices.dim()
                indices[last] = first(case, by_name) + beyond
                yield name, args, int(indices[last])


def indices(case: Case) -> None:
    """Check that an index past the end raises OpArgumentError and that mutated arguments keep their contents."""
    asked = False
    for name, args, number in _bad(case):
        asked = True
        written = [(parameter, args[case.op.parameters.index(parameter)]) for parameter in case.op.mutates]
        before = [bits(tensor) for _, tensor in written]
        try:
            case.call(args)
        except OpArgumentError:
            pass
        else:
            raise Failed(f"the call accepts {number} in {name}, although it is out of range")
        for (parameter, tensor), was in zip(written, before, strict=True):
            if not torch.equal(bits(tensor), was):
                raise Failed(
                    f"the call refuses {number} in {name}, but only after it has written to {parameter}"
                )
    if not asked:
        raise Skipped("the op does not promise to refuse wrong indices, or the sample has no indices")
