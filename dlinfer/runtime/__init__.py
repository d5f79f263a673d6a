"""Compiled graphs outside the compiler: artifacts in files, and the sessions that run them.

``aot`` makes artifacts (``dlinfer.compile``), ``artifact`` writes and reads them, ``session`` runs them
(``dlinfer.load``). It stands above ``graph``, which knows nothing of it.
"""
