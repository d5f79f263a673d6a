"""The graph engine ``sophgo``: runs regions as bmodels on a chip or its emulator."""
