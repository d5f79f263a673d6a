"""Is a vendor right? Every op, sample and dtype that it claims, through every check.

In: a vendor's name. Out: a ``Report`` of results, which ``report`` writes as JSON, JUnit and HTML. The author of a
vendor calls it, most often as ``dlinfer conformance NAME``; docs/guides/conformance.md lists the checks.
"""
