"""BMRuntime in a process of its own: chips, device memory and loaded bmodels, from this side of the wire.

``device.open_device`` gives a device, ``loaded.LoadedModel`` a bmodel on some devices. What the C library does,
also when it crashes or hangs, happens in a worker (``child``) and comes back as an error.
"""
