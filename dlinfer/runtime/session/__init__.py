"""Sessions: load an artifact, run it by the names of its inputs and outputs, measure runs and describe the artifact.

A run takes a dict of arrays and returns a dict of arrays. The qaic vendor's session uses these sessions.
"""
