"""Graph runners that LMDeploy's own backends for devices other than CUDA import from here by name."""
