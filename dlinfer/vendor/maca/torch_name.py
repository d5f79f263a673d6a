"""torch's name of the device."""

import torch

DEVICE_TYPE = "maca" if hasattr(torch, "maca") else "cuda"
"""It is "cuda" in MetaX's build of torch; "maca" where a backend of that name is registered, as the tests' card is."""
