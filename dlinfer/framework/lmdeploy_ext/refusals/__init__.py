"""What is refused, by name: folders, models, options and requests that would fail late or give wrong tokens.

In come configurations and requests, out come errors of dlinfer's before anything is lost.
"""
