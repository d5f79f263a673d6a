"""The worker's side: BMRuntime by ctypes, called over a socket.

``runtime/worker.py`` starts these files in a process without dlinfer, torch and numpy, which is small and starts in a
tenth of a second. So they use only the standard library and relative imports.
"""
