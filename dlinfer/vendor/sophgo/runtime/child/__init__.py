"""The worker's side: BMRuntime by ctypes, asked over a socket.

These files run in a process without dlinfer, torch and numpy (``runtime/worker.py`` starts it), so that it starts in
a tenth of a second and is as small as the C library lets it be. Hence the standard library only, and imports that
are relative.
"""
