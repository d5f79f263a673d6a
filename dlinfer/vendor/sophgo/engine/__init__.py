"""The graph engine ``sophgo``: regions as bmodels on a chip or on its emulator."""
