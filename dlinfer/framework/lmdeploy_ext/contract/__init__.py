"""Compares LMDeploy's source with this package: what each side takes of the other. LMDeploy is not imported."""
