"""torch's name of the device."""

import torch

DEVICE_TYPE = "maca" if hasattr(torch, "maca") else "cuda"
""""cuda" in MetaX's build of torch; "maca" if a backend of that name is registered, like the tests' card."""
