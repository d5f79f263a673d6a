"""What LMDeploy's source asks of this package, and what this package takes of LMDeploy, compared without importing it.

In come a folder with LMDeploy's source and a device type, out comes a report of what does not fit, by file and line.
"""
