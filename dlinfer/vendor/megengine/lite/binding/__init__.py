"""The C library behind MegEngine Lite: loading it, calling it, and checking its arguments and answers."""
