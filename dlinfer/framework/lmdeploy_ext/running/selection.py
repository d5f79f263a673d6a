"""Which backend of layers LMDeploy takes on a device of ours."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.vendor_devices import vendor_device_init
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.backends.selector:_get_backend",
    why="knows four device types; also the first that a spawned worker asks",
)
def _get_backend(original: Original) -> Any:
    from lmdeploy.pytorch.devices import get_device_manager

    context = get_device_manager().current_context()
    if context is None:
        return original()
    if not activation.serves(context.device_type):
        vendor_device_init(context.device_type)
        return original()
    activation.activate(context.device_type)
    from dlinfer.framework.lmdeploy_ext.running.backend import OpsBackend

    return OpsBackend
