"""What serving a model folder would take and whether it would be refused, told before any weight is loaded.

In come a folder and the options of an engine, out comes a report: LMDeploy's class, dtype, ops, and a plan of memory.
"""
