"""The graph engine ``sophgo``: it runs regions as bmodels on a chip or its emulator."""
