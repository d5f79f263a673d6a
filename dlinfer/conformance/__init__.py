"""The conformance kit: check a vendor with every op, sample and dtype that it claims.

The authors of a vendor run the kit as ``dlinfer conformance NAME``. The result is a ``Report``, which the package
``report`` writes as JSON, JUnit or HTML. docs/guides/conformance.md lists the checks.
"""
