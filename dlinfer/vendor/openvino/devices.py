"""OpenVINO's devices: whether one is there, and how a model is compiled for it."""

import functools
import os
from typing import Any

import openvino as ov
import torch

from dlinfer.errors import CompileOptionError, UnsupportedFeatureError
from dlinfer.vendor.openvino.options import OpenVINOOptions


@functools.cache
def core() -> ov.Core:
    """The process's one core; it loads a device's plugin when that is first used."""
    return ov.Core()


class _Process:
    """forked: whether this process was forked from one that had loaded OpenVINO. The parent kept OpenVINO's threads."""

    forked = False


def _note_fork() -> None:
    _Process.forked = _Process.forked or core.cache_info().currsize > 0


os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Raise UnsupportedFeatureError where OpenVINO would wait for ever, for threads that only the parent has."""
    if _Process.forked:
        raise UnsupportedFeatureError(
            feature="a process that was forked after OpenVINO was loaded",
            where="OpenVINO, whose threads stayed in the parent",
            advice="start it by multiprocessing's 'spawn' or 'forkserver', or fork before anything is compiled.",
        )


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


def has_float16() -> bool:
    """Whether the CPU computes in float16; without, its plugin computes in bfloat16 where the CPU has that."""
    return "FP16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def properties(options: OpenVINOOptions, precision: str, cache: str) -> dict[str, Any]:
    """How a device is to compile a model whose own floating type is ``precision``, and that of its KV caches ``cache``.

    Everything that would change numbers is said: what a plugin takes by itself differs between devices and releases,
    and the CPU's default of 8 bits for KV caches failed. For keys and values it is said again, since the mode ACCURACY
    takes float32 whatever is said for both together.
    """
    hint = precision if options.precision == "model" else options.precision
    if hint == "f16" and options.device.split(".")[0] == "CPU" and not has_float16():
        hint = "f32"  # bfloat16 would lose three bits of each number without a word
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
