"""Graph runners for LMDeploy's own backends of devices other than CUDA, which import them from this package."""
