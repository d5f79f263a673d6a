"""The checks, one file for each family.

A check takes a ``Case``. It raises Failed, Skipped, or one of the errors ``DECLINES`` if the vendor declines the call.
"""
