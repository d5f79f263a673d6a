"""Self-tests: an engine or kernel must compute a few known results on this CPU before dlinfer uses it.

A library that is correct on one CPU may be wrong on another CPU, because it runs other instructions there. Each case
compares a computation with a result that was computed in another way. A case runs once for each CPU, library version
and dtype; the disk cache keeps its result.

``case`` defines a case and its result. ``suite`` runs cases and stores results. ``torch_cases`` has functions that
every engine should compute. Vendors define further cases next to their lowerings and kernels.
"""
