"""Names that LMDeploy 0.18 imports at its start for linear attention; upstream has Triton kernels here."""


def init_device_properties_triton() -> None:
    """Do nothing: no kernel here is in Triton. Models with linear attention run on the ops' references."""
