"""BMRuntime in its own process: chips, device memory and loaded bmodels, from this side of the socket.

``device.open_device`` returns a device; a ``loaded.LoadedModel`` is a bmodel on some devices. The C library runs in a
worker process (``child``). If it crashes or hangs there, the caller here gets an error."""
