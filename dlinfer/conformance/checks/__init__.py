"""The checks, a family a file. Each takes a ``Case`` and returns, or raises Failed, Skipped or what declines."""
