"""The C library behind MegEngine Lite: how it is loaded, called and checked, and the kinds of values that it takes."""
