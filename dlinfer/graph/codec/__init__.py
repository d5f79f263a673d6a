"""The written form of graphs and programs: JSON, for the disk cache and for artifacts.

``arguments`` writes the arguments of calls, and ``calls`` the functions that a graph calls. ``interface``, ``graph``
and ``program`` write whole interfaces, graphs and programs.
"""
