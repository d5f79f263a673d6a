"""Corrects faults of LMDeploy that cause wrong answers or end a server. A file goes once a release fixes its fault."""
