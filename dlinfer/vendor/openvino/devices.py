"""OpenVINO's devices: check that a device exists, and choose the properties for compiling on it."""

import functools
import os
from typing import Any

import openvino as ov
import torch

from dlinfer.errors import CompileOptionError, UnsupportedFeatureError
from dlinfer.vendor.openvino.options import OpenVINOOptions


@functools.cache
def core() -> ov.Core:
    """Return OpenVINO's core, one for the process. It loads a device's plugin when the device is first used."""
    return ov.Core()


class _Process:
    """Facts about this process. forked: whether it was forked after OpenVINO was loaded."""

    forked = False


def _note_fork() -> None:
    _Process.forked = _Process.forked or core.cache_info().currsize > 0


os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Raise UnsupportedFeatureError if the process was forked after OpenVINO was loaded.

    OpenVINO would wait forever for its threads, which stayed in the parent.
    """
    if _Process.forked:
        raise UnsupportedFeatureError(
            feature="a process that was forked after OpenVINO was loaded",
            where="OpenVINO, whose threads stayed in the parent",
            advice=(
                "start the process with multiprocessing's 'spawn' or 'forkserver', or fork before the first "
                "compilation."
            ),
        )


def check_device(name: str) -> None:
    """Raise CompileOptionError if OpenVINO does not find the device. The error lists the devices that it finds."""
    devices = core().available_devices
    kinds = {device.split(".")[0] for device in devices}
    if name not in devices and name not in kinds:
        expected = "one of the devices that OpenVINO finds here: " + ", ".join(devices)
        raise CompileOptionError(option="engine_options['device']", given=name, expected=expected)


def has_bfloat16() -> bool:
    """Return whether the CPU computes in bfloat16; otherwise its plugin computes in float32."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def has_float16() -> bool:
    """Return whether the CPU computes in float16; otherwise its plugin computes in bfloat16 or float32."""
    return "FP16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def properties(options: OpenVINOOptions, precision: str, cache: str) -> dict[str, Any]:
    """Return the properties to compile a model with.

    precision: the model's floating type. cache: the type of its KV caches; empty if it writes none.

    Every property that changes results is set, because defaults differ between devices and releases. The CPU's default
    of KV caches in 8 bits even gave wrong results. The caches of keys and of values have properties of their own: in
    the mode ACCURACY OpenVINO ignores the common property and takes float32."""
    hint = precision if options.precision == "model" else options.precision
    if hint == "f16" and options.device.split(".")[0] == "CPU" and not has_float16():
        hint = "f32"  # bfloat16 would silently lose three bits of each number
    hints: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": hint,
        "EXECUTION_MODE_HINT": "ACCURACY",
        "PERFORMANCE_HINT": "LATENCY",
    }
    if options.device.split(".")[0] != "CPU":
        return hints
    return hints | {
        "KV_CACHE_PRECISION": cache or hint,
        "KEY_CACHE_PRECISION": cache or hint,
        "VALUE_CACHE_PRECISION": cache or hint,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(options.dynamic_quantization_group_size),
        "INFERENCE_NUM_THREADS": options.num_threads or torch.get_num_threads(),
        "ENABLE_CPU_PINNING": False,  # torch's threads use the same cores
    }
