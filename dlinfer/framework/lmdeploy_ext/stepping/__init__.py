"""Patches the steps of LMDeploy's engine: they run on a thread of their own, share forwards, and have small chunks."""
