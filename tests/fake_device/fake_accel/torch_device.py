"""The fake device in torch: tensors of ``device="fakeaccel"``, by dlinfer's stand-in for a device."""

from dlinfer.conformance import stand_in

NAME = "fakeaccel"


def install() -> None:
    """Make the device. For the entry point group ``torch.backends``, which torch loads when it is imported."""
    stand_in.install(NAME)
