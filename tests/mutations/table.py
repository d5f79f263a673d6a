"""The faults: what is changed in which file, and which tests of the gate are to fail of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """name: what is wrong then. old, new: text of ``file``, once in it. tests: what is run, as pytest takes it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = (
    # What a reading of the tests found that none of them would have noticed.
    Mutation(
        "the digests of an artifact are not compared",
        "dlinfer/runtime/artifact/container.py",
        'if bytes(stored) != b"".join(digests.values()):',
        "if False:",
        ("tests/runtime/artifact/test_container.py",),
    ),
    Mutation(
        "linear_use_nn_layout is ignored",
        "dlinfer/ops/linear/dense.py",
        "weight.t() if settings.current().linear_use_nn_layout else weight",
        "weight",
        ("tests/ops/linear/test_dense.py", "-k", "nn_layout"),
    ),
    Mutation(
        "DLINFER_VENDOR is ignored",
        "dlinfer/vendor/discovery.py",
        "if name and get(name).serves(device_type):",
        "if False and get(name).serves(device_type):",
        ("tests/vendor/test_discovery.py",),
    ),
    Mutation(
        "qaic's benchmark does not look at its inputs",
        "dlinfer/vendor/qaic/session.py",
        "        if input_dict is not None:\n"
        "            check_inputs(input_dict, self._inputs, self._backend.defaults)\n",
        "",
        ("tests/vendor/qaic/test_running.py",),
    ),
    Mutation(
        "qaic takes arrays of the wrong size",
        "dlinfer/vendor/qaic/tensors.py",
        "if fixed is not None and size != fixed:",
        "if False and size != fixed:",
        ("tests/vendor/qaic/test_running.py",),
    ),
    Mutation(
        "a LiteTensor lies on device 0, whatever was asked",
        "dlinfer/vendor/megengine/lite/tensor.py",
        'whole("LiteTensor", "device_id", device_id)',
        "0",
        ("tests/vendor/megengine/test_tensor.py",),
    ),
    Mutation(
        "LiteTensor.update does nothing",
        "dlinfer/vendor/megengine/lite/tensor.py",
        '        library().call("get_tensor_layout", self._handle, ctypes.byref(LiteLayout()))\n',
        "        return\n",
        ("tests/vendor/megengine/test_tensor.py",),
    ),
    Mutation(
        "captured SiLU is computed as GELU",
        "dlinfer/ops/activation/silu_and_mul.py",
        "functional.silu(",
        "functional.gelu(",
        ("tests/ops/test_huggingface.py", "tests/ops/test_kernels_against_reference.py"),
    ),
    # Chosen over the rooms.
    Mutation(
        "what was there before a graph runs is taken to be apart at every call",
        "dlinfer/graph/ir/effects.py",
        "        bools, small, wide = self.by_width\n",
        "        return memory\n        bools, small, wide = self.by_width\n",
        ("tests/graph/ir/test_effects.py", "tests/graph/test_aliasing.py"),
    ),
    Mutation(
        "ops of other libraries are taken to have no effects",
        "dlinfer/graph/ir/dialect.py",
        "    return op.namespace not in _WITHOUT_STATE or has_registered_effect(op)\n",
        "    return False\n",
        ("tests/graph/passes/test_hidden_effects.py",),
    ),
    Mutation(
        "writes of C++ kernels in graphs do not count",
        "dlinfer/vendor/cpu/inductor/engine.py",
        'if not reference.startswith("op "):',
        "if False:",
        ("tests/vendor/cpu/inductor/test_version_counter.py",),
    ),
    Mutation(
        "attention's results are taken to lie as its fake says",
        "dlinfer/graph/ir/effects.py",
        "if not isinstance(value, torch.Tensor) or value.dim() == 0 or not made_memory(node):\n        return None",
        "if True:\n        return None",
        ("tests/graph/ir/test_effects.py", "tests/vendor/cpu/inductor/test_layouts.py"),
    ),
    Mutation(
        "the key of a compiled thing leaves out the engine's options",
        "dlinfer/graph/cache/key.py",
        "return {item.name: _canonical(getattr(value, item.name)) for item in fields(value)}",
        "return {i.name: _canonical(getattr(value, i.name)) for i in fields(value) if i.name != 'engine_options'}",
        ("tests/graph/cache/test_key.py",),
    ),
    Mutation(
        "a fallback under the policy error is taken",
        "dlinfer/ops/core/fallback.py",
        '    if policy == "error":\n        raise refusal()\n',
        "",
        ("tests/ops/core/test_fallback.py",),
    ),
    Mutation(
        "graphs run on with caches that another vendor lays out otherwise",
        "dlinfer/graph/lowering/kv_layouts.py",
        "if discovery.kv_orders.get(device) != order and",
        "if False and",
        ("tests/graph/lowering/test_kv_layouts.py",),
    ),
    Mutation(
        "a fused pattern's inner results are dropped where others use them",
        "dlinfer/graph/passes/fusion/rule.py",
        "if user not in read_through:",
        "if False:",
        (
            "tests/graph/passes/fusion/test_gated_activation.py",
            "tests/graph/passes/fusion/test_close_calls.py",
        ),
    ),
    Mutation(
        "a bound call does not notice an exchanged weight or cache",
        "dlinfer/graph/bound_call/binding.py",
        'checks.append("live != copies")',
        "pass",
        ("tests/graph/bound_call/test_binding.py",),
    ),
    Mutation(
        "Llama 3's long waves are not slowed down",
        "dlinfer/framework/lmdeploy_ext/layers/positions/rotary.py",
        "slowed = torch.where(wavelengths > long_wave, frequencies / factor, frequencies)",
        "slowed = frequencies",
        ("tests/framework/lmdeploy_ext/layers/positions/test_rotary.py",),
    ),
    Mutation(
        "a window of w shows w + 1 keys",
        "dlinfer/framework/lmdeploy_ext/layers/positions/windows.py",
        "return (sliding_window - 1, 0) if",
        "return (sliding_window, 0) if",
        ("tests/framework/lmdeploy_ext/layers/positions/test_windows.py",),
    ),
    Mutation(
        "a min_p of 2 reaches LMDeploy's assertion",
        "dlinfer/framework/lmdeploy_ext/checks/request/generation_options.py",
        '"min_p": _Number(0, 1, whole=False)',
        '"min_p": _Number(0, 9, whole=False)',
        ("tests/framework/lmdeploy_ext/checks/request/test_generation_options.py",),
    ),
    Mutation(
        "OpenVINO reads zeros for an index outside",
        "dlinfer/vendor/openvino/lowerings/places.py",
        "    if fixed is not None and _known_inside(index, fixed, negative):\n",
        "    if True:\n",
        ("tests/vendor/openvino/test_places.py",),
    ),
    Mutation(
        "rms_norm forgets eps",
        "dlinfer/ops/norm/rms_norm.py",
        "scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)",
        "scale = torch.rsqrt(wide.square().mean(-1, keepdim=True))",
        ("tests/ops/test_huggingface.py", "tests/ops/test_kernels_against_reference.py", "-k", "norm"),
    ),
    Mutation(
        "int4 packs the second half of a head below the first",
        "dlinfer/ops/attention/kv_quantisation.py",
        "codes = first | (second << 4)",
        "codes = second | (first << 4)",
        ("tests/ops/test_quantised_kv_cache.py", "-k", "codes or first_half"),
    ),
    Mutation(
        "a prompt attends to keys as they came, and not as a quantised cache holds them",
        "dlinfer/framework/lmdeploy_ext/layers/attention.py",
        "if meta.is_prefill_no_cache and not quantised and not in_chunks:",
        "if meta.is_prefill_no_cache and not in_chunks:",
        ("tests/framework/lmdeploy_ext/layers/quantised/test_kv_quantisation.py", "-k", "holds"),
    ),
)
