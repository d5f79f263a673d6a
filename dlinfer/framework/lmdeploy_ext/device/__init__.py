"""Connects LMDeploy to the device it runs on: activation, LMDeploy's view of torch, KV cache and memory.

LMDeploy imports this package to initialise a vendor's device, but also at other times. So the import itself
initialises nothing: ``engine_config`` calls ``vendor_devices.vendor_device_init`` before LMDeploy's backend starts.
"""
