"""What LMDeploy 0.18 imports at its start for models with linear attention, whose kernels upstream has in Triton."""


def init_device_properties_triton() -> None:
    """Nothing: no kernel here is in Triton. Models with linear attention run on the ops' references."""
