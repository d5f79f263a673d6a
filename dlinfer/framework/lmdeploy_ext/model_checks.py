"""Placeholder while it is written."""

PATCHES = ()
