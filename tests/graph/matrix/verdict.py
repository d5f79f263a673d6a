"""What a record of ``model_job`` means: pass, or why not. And the table of all records."""

from collections import Counter
from typing import Any

from tests.graph.matrix.models import Architecture


def compilations(run: dict[str, Any], *, size_one: bool) -> int:
    """Compilations of the frame that has most; a graph break splits a model into several frames."""
    frames = Counter(item["frame"] for item in run["compilations"] if item["size_one"] is size_one)
    return max(frames.values(), default=0)


def breaks(run: dict[str, Any]) -> int:
    return sum(run["graph_breaks"].values())


def failures(record: dict[str, Any]) -> list[str]:
    """Every condition that a record does not meet, in words; empty means pass."""
    if record.get("trouble"):
        return [record["trouble"]]
    tested, baseline = record["tested"], record["baseline"]
    found = []
    if tested["error"]:
        found.append(tested["error"])
    found += [f"wrong: {item}" for item in tested["wrong"][:3]]
    if len(tested["wrong"]) > 3:
        found.append(f"wrong: {len(tested['wrong']) - 3} more of {tested['compared']}")
    if (count := compilations(tested, size_one=False)) > record["most_compilations"]:
        found.append(f"{count} compilations besides size-1 variants")
    if any(tested["sweeps"][1:]):
        found.append(f"{sum(tested['sweeps'][1:])} compilations when the same sizes came again")
    if breaks(tested) > breaks(baseline):
        found.append(f"{breaks(tested)} graph breaks, {baseline['backend']} has {breaks(baseline)}")
    if tested["graphs"] > baseline["graphs"] and not baseline["error"]:
        found.append(f"{tested['graphs']} graphs, {baseline['backend']} has {baseline['graphs']}")
    found += [f"fell back: {item}" for item in tested["report"]["fallbacks"]]
    return found


HEADER = (
    "architecture",
    "kind",
    "result",
    "max error",
    "compiled",
    "size-1",
    "breaks ours / aot_eager",
    "nodes in clusters / kernels",
    "notes",
)


def row(architecture: Architecture, record: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table, as text."""
    problems = failures(record)
    start = (architecture.name, architecture.kind, "FAIL" if problems else "pass")
    notes = "; ".join([*problems, architecture.note] if architecture.note else problems)
    if record.get("trouble"):
        return (*start, *[""] * (len(HEADER) - 4), notes)
    tested, baseline = record["tested"], record["baseline"]
    return (
        *start,
        f"{tested['max_error']:.1e}",
        str(compilations(tested, size_one=False)),
        str(compilations(tested, size_one=True)),
        f"{breaks(tested)} / {'raises' if baseline['error'] else breaks(baseline)}",
        f"{tested['report']['in_clusters']} / {tested['report']['kernels']}",
        notes,
    )


def markdown(rows: list[tuple[str, ...]]) -> str:
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
