"""Provides names that LMDeploy's own backends for devices other than CUDA import from this package."""
