"""The module that LMDeploy 0.18 imports for linear attention at start. Upstream dlinfer has Triton kernels here."""


def init_device_properties_triton() -> None:
    """Do nothing: no kernel here is in Triton. Models with linear attention run on the ops' references."""
