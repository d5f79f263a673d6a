"""Connects LMDeploy to the device it runs on: activation, LMDeploy's view of torch, KV cache and memory.

LMDeploy expects that importing this package initialises a vendor's device. But LMDeploy also imports it at other times,
so the import itself initialises nothing. Instead ``engine_config`` calls ``vendor_devices.vendor_device_init`` before
LMDeploy's own backend starts.
"""
