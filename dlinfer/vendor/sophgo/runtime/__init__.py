"""BMRuntime in its own process: chips, device memory and loaded bmodels, from this side of the socket.

``device.open_device`` returns a device, ``loaded.LoadedModel`` is a bmodel on some devices. The C library runs in a
worker (``child``); its crashes and hangs become errors here.
"""
