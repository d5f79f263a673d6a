"""Corrects faults of LMDeploy that cause wrong answers or end a server.

A file is deleted once the supported LMDeploy releases no longer have the fault that the file corrects.
"""
