"""The code of the worker process: it calls BMRuntime by ctypes, and answers dlinfer's process over a socket.

``runtime/worker.py`` starts these files in a process without dlinfer, torch and numpy. Such a process is small and
starts in a tenth of a second. Therefore these files import only the standard library and each other.
"""
