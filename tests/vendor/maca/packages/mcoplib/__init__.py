"""A stand-in of MetaX's mcoplib for tests: its modules lead to ``tests.vendor.maca.simulated_card``."""
