"""Every claim of the vendor holds. The same as ``dlinfer conformance acme``, for who runs pytest already."""

from dlinfer.conformance import apart


def test_every_claim_holds() -> None:
    report = apart.run("acme")
    assert report.holds, "\n".join(map(str, report.failures))
