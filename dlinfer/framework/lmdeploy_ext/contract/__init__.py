"""Compares LMDeploy's source with this package: the names that each side uses from the other. Imports no LMDeploy."""
