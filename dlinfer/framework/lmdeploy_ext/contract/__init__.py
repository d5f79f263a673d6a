"""Compares LMDeploy's source with this package: the names that each uses from the other. LMDeploy is not imported."""
