"""The one written form of graphs and programs: JSON, for the disk cache and for artifacts.

``arguments`` writes what calls are passed, ``calls`` writes what a graph calls, ``graph`` and ``program`` write wholes.
"""
