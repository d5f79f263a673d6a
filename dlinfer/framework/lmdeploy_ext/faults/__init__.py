"""Patches for faults of LMDeploy that give a wrong answer or end a server: one file each, until a release fixes it."""
