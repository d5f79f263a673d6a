"""Artifacts: compiled graphs with their weights and interfaces, in memory and in files.

Users and the command line write compiled graphs to a file, and sessions read them after a check of every part.
"""
