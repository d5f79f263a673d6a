"""OpenVINO's devices: whether one is there, how a model is compiled for it, and what has to be kept from its passes."""

import functools
from typing import Any

import openvino as ov
import openvino.opset16 as op
import torch
from openvino import Node, Output

from dlinfer.errors import CompileOptionError
from dlinfer.vendor.openvino.options import OpenVINOOptions

_NARROW = (ov.Type.bf16, ov.Type.f16)
_ENDS = ("MatMul", "Result")
_FUSED = ("Add", "Convert", "Divide", "Multiply", "Reshape", "Select", "Subtract", "Transpose")


@functools.cache
def core() -> ov.Core:
    """The process's one core; it loads a device's plugin when that is first used."""
    return ov.Core()


def check_device(name: str) -> None:
    """Raise CompileOptionError, which names what is there, for a device that is not."""
    found = core().available_devices
    kinds = {one.split(".")[0] for one in found}
    if name not in found and name not in kinds:
        expected = "one of the devices that OpenVINO finds here: " + ", ".join(found)
        raise CompileOptionError(option="engine_options['device']", given=name, expected=expected)


def has_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16; without, its plugin computes in float32."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def properties(options: OpenVINOOptions, precision: str, cache: str) -> dict[str, Any]:
    """How a device is to compile a model whose own floating type is ``precision``, and that of its KV caches ``cache``.

    Everything that would change numbers is said: what a plugin takes by itself differs between devices and releases,
    and the CPU's default of 8 bits for KV caches failed. For keys and values it is said again, since the mode ACCURACY
    takes float32 whatever is said for both together.
    """
    hint = precision if options.precision == "model" else options.precision
    said: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": hint,
        "EXECUTION_MODE_HINT": "ACCURACY",
        "PERFORMANCE_HINT": "LATENCY",
    }
    if options.device.split(".")[0] != "CPU":
        return said
    return said | {
        "KV_CACHE_PRECISION": cache or hint,
        "KEY_CACHE_PRECISION": cache or hint,
        "VALUE_CACHE_PRECISION": cache or hint,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(options.dynamic_quantization_group_size),
        "INFERENCE_NUM_THREADS": options.num_threads or torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,  # torch's threads want the same cores
    }


def part_attention(model: ov.Model) -> None:
    """Put attention in 16 bits apart from what is computed of its result and read twice, in place.

    The CPU plugin makes one node of scores, softmax, product and elementwise ops behind it. OpenVINO 2026.4.1 ends the
    process over one of two operands that is read twice. It takes none behind a roll by no places, which no pass folds;
    the roll copies the result.
    """
    for node in model.get_ordered_ops():
        if not (_is_attention(node) and node.get_output_element_type(0) in _NARROW and _forks(node)):
            continue
        readers = list(node.output(0).get_target_inputs())
        nowhere = op.constant([0], ov.Type.i64)
        parted = op.roll(node.output(0), nowhere, nowhere).output(0)
        for reader in readers:
            reader.replace_source_output(parted)


def _is_attention(node: Node) -> bool:
    if node.get_type_name() == "ScaledDotProductAttention":
        return True
    return node.get_type_name() == "MatMul" and _from_softmax(node.input_value(0))


def _from_softmax(value: Output) -> bool:
    node = value.get_node()
    while node.get_type_name() in _FUSED:
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Softmax"


def _forks(node: Node) -> bool:
    """Whether something that is computed of a node is read twice before the next product."""
    readers = [one.get_node() for output in node.outputs() for one in output.get_target_inputs()]
    readers = [one for one in readers if one.get_type_name() not in _ENDS]
    return any(_reads(reader) > 1 or _forks(reader) for reader in readers)


def _reads(node: Node) -> int:
    return sum(len(output.get_target_inputs()) for output in node.outputs())
