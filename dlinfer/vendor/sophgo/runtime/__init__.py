"""BMRuntime in a worker process: chips, device memory and loaded bmodels, as this process sees them.

``device.open_device`` returns a device. ``loaded.LoadedModel`` is a bmodel on one or more devices. The C library runs
only in the worker (``child``), which answers over a socket. If the library crashes or hangs, the caller gets an
error."""
