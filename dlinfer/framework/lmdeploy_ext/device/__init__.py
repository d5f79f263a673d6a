"""Connects LMDeploy to the device it runs on: activation, LMDeploy's view of torch, KV cache and memory.

``activation`` tells all other modules which device is active. LMDeploy imports this package to initialise a vendor's
device. The import itself does nothing, as it also happens for other reasons. ``engine_config`` initialises the device
before LMDeploy's backend starts, by ``vendor_devices.vendor_device_init``.
"""
