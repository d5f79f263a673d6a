"""The checks, one file for each family. A check takes a ``Case``, and raises Failed, Skipped or the call's refusal."""
