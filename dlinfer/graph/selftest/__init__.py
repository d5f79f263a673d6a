"""Known answers: what an engine or a kernel must compute rightly on this CPU before it is trusted with it.

A library that is right on one CPU may be wrong on the next, which takes other instructions. So each part of it is
asked what a few numbers give, and the answer is compared with one that was worked out another way. That happens once
for each CPU, version and dtype; what came out is kept on disk.

``answer`` has the nouns, ``suite`` runs and remembers, ``store`` is the disk, ``asking`` puts a function of torch to a
graph engine, ``questions`` are functions that every engine should answer. Each vendor says beside its lowerings or
kernels what it is asked. In: KnownAnswer. Out: a reason not to trust an op, or None.
"""
