"""The device under LMDeploy: which one is active, what LMDeploy sees of torch, its configuration, caches and memory.

In come LMDeploy's questions about devices, out come answers for ours. Every other room here asks ``activation``.

LMDeploy imports this module where a vendor's device is to be initialised. Importing it does nothing, as that happens
for other reasons too: ``patches`` initialises the device before LMDeploy's backend starts, by
``vendor_devices.vendor_device_init``.
"""
