"""The binding of MegEngine Lite's C library: it loads and calls the library, and checks arguments and results."""
