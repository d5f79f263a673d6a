"""Artifacts: compiled graphs with their weights and interfaces, in memory and in files.

Users write artifacts with ``Artifact.save``. Sessions read a file only after a check of every part.
"""
