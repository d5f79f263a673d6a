"""A report as one self-contained HTML page: a table of ops by checks, then the failures and the declined calls."""

from collections import Counter
from html import escape

from dlinfer.conformance.result import DECLINED, FAILED, PASSED, SKIPPED, UNCLAIMED, Report, Result

_STYLE = """
:root { color-scheme: light dark; font: 14px system-ui, sans-serif }
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
table { border-collapse: collapse } th, td { border: 1px solid #8886; padding: .2rem .5rem; text-align: left }
td { text-align: right } .passed { background: #2a83 } .failed { background: #d334; font-weight: 600 }
.declined { background: #c905 } .skipped, .unclaimed { color: #888 } .scroll { overflow-x: auto }
li { margin: .3rem 0 } code { font-size: 12px }
"""

_WORST = (FAILED, DECLINED, PASSED, SKIPPED, UNCLAIMED)


def page(report: Report) -> str:
    head, counts = report.header, report.counts()
    verdict = (
        "every claim holds"
        if report.holds
        else "some claims do not hold"
        if counts[FAILED]
        else "nothing passed"
    )
    package = f"{head.distribution} {head.version}".strip() or "no package"
    said = ", ".join(f"{counts[state]} {state}" for state in _WORST if counts[state])
    how = "thorough" if head.thorough else "quick"
    lines = (
        f"{escape(package)}, device {escape(head.device)}; dlinfer {escape(head.dlinfer)}, torch {escape(head.torch)}",
        f"{how}, {report.seconds:.0f} seconds: {said}",
    )
    title = f"dlinfer conformance {escape(head.vendor)}: {verdict}"
    body = "".join(f"<p>{line}</p>" for line in lines) + _table(report)
    body += _listed("Failed", report.failures)
    for state in (DECLINED, UNCLAIMED):
        body += _grouped(state.capitalize(), [result for result in report.results if result.state == state])
    whole = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><body><h1>{title}</h1>{body}</body></html>\n"
    )
    return whole.encode(errors="replace").decode()  # UTF-8 cannot encode all messages of vendors


def _table(report: Report) -> str:
    checks = report.checks()
    rows = "".join(
        f"<tr><th>{escape(op or 'the run')}</th>"
        + "".join(_cell([result for result in results if result.check == check]) for check in checks)
        + "</tr>"
        for op, results in report.by_op().items()
    )
    heads = "".join(f"<th>{escape(check)}</th>" for check in checks)
    return f'<div class="scroll"><table><tr><th>op</th>{heads}</tr>{rows}</table></div>'


def _cell(results: list[Result]) -> str:
    if not results:
        return "<td></td>"
    counts = Counter(result.state for result in results)
    worst = next(state for state in _WORST if counts[state])
    words = ", ".join(f"{counts[state]} {state}" for state in _WORST if counts[state])
    shown = f"{counts[PASSED]}/{len(results)}" if worst in (FAILED, DECLINED, PASSED) else worst
    return f'<td class="{worst}" title="{words}">{shown}</td>'


def _listed(title: str, results: list[Result]) -> str:
    if not results:
        return ""
    items = "".join(f"<li><code>{escape(str(result))}</code></li>" for result in results)
    return f"<h2>{title}</h2><ul>{items}</ul>"


def _grouped(title: str, results: list[Result]) -> str:
    counts = Counter((result.op, result.check, result.detail) for result in results)
    if not counts:
        return ""
    items = "".join(
        f"<li>{number} of <code>{escape(op)} {escape(check)}</code>: {escape(detail)}</li>"
        for (op, check, detail), number in counts.items()
    )
    return f"<details><summary>{title}: {len(results)}</summary><ul>{items}</ul></details>"
