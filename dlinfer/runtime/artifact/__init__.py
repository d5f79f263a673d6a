"""Artifacts: compiled graphs with their weights and signatures, in memory and in files.

In come compiled graphs or a file of anybody's, which is checked piece by piece; out come stages that run. Users, the
command line and sessions call it.
"""
