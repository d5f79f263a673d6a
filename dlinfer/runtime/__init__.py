"""Compiled graphs outside the compiler: artifacts in files, and the sessions that run them.

``aot`` builds artifacts (``dlinfer.compile``). ``artifact`` writes and reads them. ``session`` runs them
(``dlinfer.load``). This package imports ``graph``; ``graph`` never imports this package.
"""
