"""A report as JUnit XML: a suite for each op, a case for each check of a sample. What was not served is skipped."""

from xml.etree import ElementTree

from dlinfer.conformance.result import FAILED, PASSED, Report, Result


def text(report: Report) -> str:
    """The XML."""
    head = report.header
    root = ElementTree.Element("testsuites", _counted(report.results, f"dlinfer conformance {head.vendor}"))
    for op, results in report.by_op().items():
        suite = ElementTree.SubElement(root, "testsuite", _counted(results, f"{head.vendor}.{op or 'run'}"))
        for one in results:
            suite.append(_case(head.vendor, one))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counted(results: list[Result], name: str) -> dict[str, str]:
    return {
        "name": name,
        "tests": str(len(results)),
        "failures": str(sum(one.state == FAILED for one in results)),
        "errors": "0",
        "skipped": str(sum(one.state not in (PASSED, FAILED) for one in results)),
        "time": f"{sum(one.seconds for one in results):.3f}",
    }


def _case(vendor: str, one: Result) -> ElementTree.Element:
    inside = "-".join(part for part in (one.dtype, one.sample) if part)
    case = ElementTree.Element(
        "testcase",
        {
            "classname": f"{vendor}.{one.op or 'run'}",
            "name": f"{one.check}[{inside}]" if inside else one.check,
            "time": f"{one.seconds:.4f}",
        },
    )
    if one.state == FAILED:
        ElementTree.SubElement(case, "failure", {"message": _printable(one.detail)}).text = _printable(
            str(one)
        )
    elif one.state != PASSED:
        ElementTree.SubElement(case, "skipped", {"message": _printable(f"{one.state}: {one.detail}")})
    return case


def _printable(words: str) -> str:
    """Text without the characters that XML has no way to write."""
    return "".join(
        c if c in "\t\n" or (ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000) else "?" for c in words
    )
