"""Corrects how a server and its processes start and end."""
