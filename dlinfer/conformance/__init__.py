"""The conformance kit: check a vendor with every op, sample and dtype that it claims.

Authors of vendors run it as ``dlinfer conformance NAME``. It returns a ``Report`` of results, which ``report`` writes
as JSON, JUnit and HTML. docs/guides/conformance.md lists the checks.
"""
