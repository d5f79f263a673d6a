"""The device in torch: tensors of ``device="acme"``. A stand-in, until a torch package of yours brings the device."""

from dlinfer.conformance import stand_in

NAME = "acme"


def install() -> None:
    """Make the device. For the entry point group ``torch.backends``, which torch loads when it is imported."""
    stand_in.install(NAME)
