"""A report as JUnit XML: one suite for each op, one test case for each check of a sample.

Declined calls count as skipped.
"""

from xml.etree import ElementTree

from dlinfer.conformance.result import FAILED, PASSED, Report, Result


def text(report: Report) -> str:
    head = report.header
    root = ElementTree.Element("testsuites", _counted(report.results, f"dlinfer conformance {head.vendor}"))
    for op, results in report.by_op().items():
        suite = ElementTree.SubElement(root, "testsuite", _counted(results, f"{head.vendor}.{op or 'run'}"))
        for result in results:
            suite.append(_case(head.vendor, result))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counted(results: list[Result], name: str) -> dict[str, str]:
    return {
        "name": name,
        "tests": str(len(results)),
        "failures": str(sum(result.state == FAILED for result in results)),
        "errors": "0",
        "skipped": str(sum(result.state not in (PASSED, FAILED) for result in results)),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }


def _case(vendor: str, result: Result) -> ElementTree.Element:
    inside = "-".join(part for part in (result.dtype, result.sample) if part)
    case = ElementTree.Element(
        "testcase",
        {
            "classname": f"{vendor}.{result.op or 'run'}",
            "name": f"{result.check}[{inside}]" if inside else result.check,
            "time": f"{result.seconds:.4f}",
        },
    )
    if result.state == FAILED:
        ElementTree.SubElement(case, "failure", {"message": _printable(result.detail)}).text = _printable(
            str(result)
        )
    elif result.state != PASSED:
        ElementTree.SubElement(case, "skipped", {"message": _printable(f"{result.state}: {result.detail}")})
    return case


def _printable(words: str) -> str:
    return "".join(
        c if c in "\t\n" or (ord(c) >= 32 and not 0xD800 <= ord(c) < 0xE000) else "?" for c in words
    )
