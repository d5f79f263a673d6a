"""Is a vendor right? Every op, sample and dtype that it claims, through every check.

In: a vendor's name. Out: a ``Report`` of results, which ``report`` writes as JSON, JUnit and HTML. Whoever makes a
vendor calls it, most often as ``dlinfer conformance NAME``; docs/guides/conformance.md says what is checked.
"""
