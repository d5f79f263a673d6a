"""Patches ``PytorchEngineConfig`` and the values that LMDeploy derives from it: device, dtype, sizes, backend."""

from typing import Any

import torch

from dlinfer.errors import UnknownVendorError
from dlinfer.framework.lmdeploy_ext.checks.options import features as refusals
from dlinfer.framework.lmdeploy_ext.conversion import loading
from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import language_configs
from dlinfer.framework.lmdeploy_ext.device import activation, cache_blocks, devices, vendor_devices
from dlinfer.framework.lmdeploy_ext.device.unchosen import is_given, mark_defaults
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.framework.patching import Original, replaces
from dlinfer.vendor import discovery


@replaces(
    "lmdeploy.messages:PytorchEngineConfig.__post_init__",
    why="asserts that device_type is one of four, that dtype is not float32, and that only cuda and ascend quantise "
    "the KV cache",
)
def _post_init(original: Original, self: Any) -> None:
    device_type, dtype = self.device_type, self.dtype
    if not activation.serves(device_type):
        if device_type not in devices.OWN:
            raise UnknownVendorError(name=device_type, available=", ".join(vendor_devices.usable()))
        vendor_devices.check_vendor(device_type)
        original(self)
        return
    vendor_devices.check_available(device_type)
    refusals.check_engine_config(self)
    cache_blocks.choose(self)
    mark_defaults(self, "cache_max_entry_count", "max_prefill_token_num")
    chosen = discovery.device(devices.torch_device(device_type)).max_prefill_tokens
    if chosen is not None and not is_given(self.max_prefill_token_num):
        self.max_prefill_token_num = chosen
    # The original asserts that device, dtype and the KV cache's quantisation are listed. So these fields hold listed
    # values during the call, and the original still runs all its other checks.
    policy = self.quant_policy
    self.device_type, self.dtype = "maca", "auto" if dtype == "float32" else dtype
    if kv_quantisation.is_served(policy):
        self.quant_policy = 0
    try:
        original(self)
    finally:
        self.device_type, self.dtype = device_type, dtype
        if kv_quantisation.is_served(policy):
            self.quant_policy = type(self.quant_policy)(policy)
    activation.activate(device_type)


@replaces("lmdeploy.utils:get_max_batch_size", why="asserts that device_type is one of four")
def _max_batch_size(original: Original, device_type: str) -> int:
    if not activation.serves(device_type):
        return original(device_type)
    return discovery.device(devices.torch_device(device_type)).max_batch_size


@replaces(
    "lmdeploy.utils:is_bf16_supported",
    why="returns False for an unknown device, and asks torch.cuda if no device is named",
    when=activation.is_on,
)
def _bf16(original: Original, device_type: str = "cuda") -> bool:
    # Code that does not know the device passes "auto" or the default "cuda". Both mean our device once it is active.
    return device_type in ("auto", "cuda") or activation.serves(device_type) or original(device_type)


@replaces(
    "lmdeploy.pytorch.config:_update_torch_dtype",
    why="silently turns float32 into float16, and does so with any dtype of an AWQ model",
    when=activation.is_on,
)
def _torch_dtype(original: Original, config: Any, dtype: str, device_type: str = "auto") -> Any:
    if dtype == "auto":  # before the original writes float16 into the configuration of AWQ models
        dtype = loading.stored_dtype(config.hf_config) or dtype
    config = original(config, "auto" if dtype == "float32" else dtype, device_type)
    parts = (getattr(part, "dtype", None) for part in language_configs(config.hf_config))
    stored = next(filter(None, parts), None)
    if dtype == "float32" or (dtype == "auto" and stored in (torch.float32, "float32")):
        config.dtype = torch.float32
    elif dtype == "bfloat16":
        config.dtype = torch.bfloat16
    return config


@replaces(
    "lmdeploy.utils:try_import_deeplink",
    why="loads the device's package in workers, but only for device types that it knows",
)
def _import_deeplink(original: Original, device_type: str) -> None:
    if activation.serves(device_type):
        activation.activate(device_type)
    else:
        vendor_devices.check_vendor(device_type)
        original(device_type)


@replaces(
    "lmdeploy.pytorch.backends.selector:_get_backend",
    why="knows four device types, and runs in a spawned worker before anything else activates the device",
)
def _get_backend(original: Original) -> Any:
    from lmdeploy.pytorch.devices import get_device_manager

    context = get_device_manager().current_context()
    if context is None:
        return original()
    if not activation.serves(context.device_type):
        vendor_devices.vendor_device_init(context.device_type)
        return original()
    activation.activate(context.device_type)
    from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend

    return OpsBackend
