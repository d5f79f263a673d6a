"""Servers of one model on one machine or several, behind a router: the parts of ``dlinfer serve``."""
