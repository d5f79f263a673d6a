"""Names that LMDeploy 0.18 imports at its start for linear attention; upstream writes these kernels in Triton."""


def init_device_properties_triton() -> None:
    """Nothing: no kernel here is in Triton. Models with linear attention run on the ops' references."""
