"""The graph engine ``sophgo``, which runs regions as bmodels on a chip or its emulator."""
