"""What would hurt a server or a pipeline, corrected where it happens: its process, its arguments, its scores.

In come calls of LMDeploy's own, out come the same calls without the fault that each patch names.
"""
