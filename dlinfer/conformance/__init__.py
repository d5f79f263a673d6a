"""The conformance kit: tests whether a vendor is right, with every op, sample and dtype that the vendor claims.

Input: a vendor's name. Output: a ``Report`` of results, which ``report`` writes as JSON, JUnit and HTML. Authors of
vendors run it as ``dlinfer conformance NAME``. docs/guides/conformance.md lists the checks.
"""
