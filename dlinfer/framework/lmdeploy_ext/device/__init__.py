"""The device under LMDeploy: which one is active, and LMDeploy's view of torch, its caches and memory.

Every other room here asks ``activation``. LMDeploy imports this package where a vendor's device is to be initialised.
Importing it does nothing, as that happens for other reasons too: ``patches`` initialises the device before LMDeploy's
backend starts, by ``vendor_devices.vendor_device_init``.
"""
