"""Corrects faults of LMDeploy that cause wrong answers or end a server. Once a release fixes a fault, drop its file."""
