"""Graph runners that LMDeploy's own backends for other devices than CUDA import from this package."""
