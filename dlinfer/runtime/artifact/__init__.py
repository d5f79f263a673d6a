"""Artifacts: compiled graphs with their weights and interfaces, in memory and in files.

Users, the command line and sessions write compiled graphs to a file. A file that is read is checked piece by piece
before a stage of it runs.
"""
