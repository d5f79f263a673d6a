"""Artifacts: compiled graphs with their weights and interfaces, in memory and in files.

Users and the command line write compiled graphs to a file, and sessions read them. Every part of a file is checked
before any of its stages runs.
"""
