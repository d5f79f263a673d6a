"""The checks, one file for each family. A check takes a ``Case``; it raises Failed, Skipped or a DECLINES error."""
