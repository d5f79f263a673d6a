"""Connects LMDeploy to the device it runs on: activation, LMDeploy's view of torch, KV cache and memory.

LMDeploy imports this package to initialise a vendor's device, and for other reasons too. So the import does nothing.
``engine_config`` initialises the device by ``vendor_devices.vendor_device_init`` before LMDeploy's backend starts.
"""
