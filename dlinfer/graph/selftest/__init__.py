"""Self-tests: an engine or kernel must compute a few known results on this CPU before dlinfer uses it.

A library that is right on one CPU may be wrong on another, which runs other instructions. Each case compares one
computation with a result that was worked out in another way. It runs once for each CPU, version and dtype, and the
disk cache keeps the result.

``case`` defines a case and its result. ``suite`` runs cases and stores their results. ``torch_cases`` has functions
that every engine should compute. Vendors define further cases beside their lowerings and kernels.
"""
