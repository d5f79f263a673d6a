"""The op matrix's answers counted and written as text."""

import re
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from tests.graph.matrix.backends import LANES

Results = Mapping[str, Mapping[str, Any]]
"""``op dtype`` -> a tally of ``op_db_job``, or ``{"trouble": why there is none}``."""


def totals(results: Results) -> Counter[str]:
    """Samples by outcome; ``trouble`` counts ops whose worker gave no answer."""
    counts: Counter[str] = Counter()
    for result in results.values():
        if "trouble" in result:
            counts["trouble"] += 1
            continue
        counts["equal"] += result["equal"]
        counts["close"] += result["close"]
        counts["wrong"] += result["wrong"]
        counts["unsupported"] += sum(result["unsupported"].values())
    return counts


def complaints(item: str, result: Mapping[str, Any]) -> list[str]:
    """What is wrong with one op, a line each."""
    if "trouble" in result:
        return [f"{item}: {result['trouble']}"]
    return [f"{item}: {detail}" for detail in result["details"]]


def reasons(results: Results) -> list[tuple[str, int, list[str]]]:
    """Why samples are unsupported: reason, samples, ops; numbers and names in a reason are left out."""
    samples: Counter[str] = Counter()
    ops: dict[str, dict[str, None]] = {}
    for item, result in results.items():
        for reason, count in result.get("unsupported", {}).items():
            general = re.sub(r"\d+", "N", reason)
            samples[general] += count
            ops.setdefault(general, {})[item.split()[0]] = None
    return [(reason, count, list(ops[reason])) for reason, count in samples.most_common()]


def text(results: Results) -> str:
    """The summary that the command prints."""
    counts = totals(results)
    right = counts["equal"] + counts["close"]
    lines = [
        f"{right} samples pass ({counts['equal']} equal to the bit, {counts['close']} within tolerance), "
        f"{counts['unsupported']} unsupported, {counts['wrong']} wrong, {counts['trouble']} ops without an answer"
    ]
    lines += [f"  unsupported {count:6} {reason} ({_few(ops)})" for reason, count, ops in reasons(results)]
    for item, result in results.items():
        lines += [f"  wrong {line}" for line in complaints(item, result)]
    return "\n".join(lines)


def _few(names: list[str], shown: int = 4) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def document(lanes: Mapping[str, Results]) -> str:
    """The page of the docs: per lane the totals, the reasons, and what is wrong."""
    parts = [
        "# Ops through torch.compile\n",
        "For everybody who asks which ops of torch survive compilation: torch's op database, every sample.\n",
        f"Made by `make graph-ops`; do not edit. torch {metadata.version('torch')}, "
        "`torch.testing._internal.common_methods_invocations.op_db`, CPU, forward, in-place variants included.\n",
        "*Unsupported* means that Dynamo did not give the whole op as one graph, or that capture or the engine refused "
        "it with a reason; the results are right all the same. It also counts samples that the judge fails too "
        "(Dynamo without a backend for capture, plain inductor for the engine).\n",
    ]
    for lane, results in lanes.items():
        counts = totals(results)
        parts += [f"## {LANES[lane].title}\n"]
        ops = len({item.split()[0] for item in results})
        parts += [
            "| ops | equal to the bit | within tolerance | unsupported | wrong | no answer |",
            "| --- | --- | --- | --- | --- | --- |",
            f"| {ops} | {counts['equal']} | {counts['close']} | {counts['unsupported']} | {counts['wrong']} | "
            f"{counts['trouble']} |\n",
            "| samples | unsupported because | ops |",
            "| --- | --- | --- |",
        ]
        parts += [
            f"| {count} | {_cell(reason)} | {_cell(_few(names))} |"
            for reason, count, names in reasons(results)
        ]
        wrong = [line for item, result in results.items() for line in complaints(item, result)]
        parts += ["", *(f"- {_cell(line)}" for line in wrong)]
    return "\n".join(parts).rstrip() + "\n"


def _cell(content: str) -> str:
    return content.replace("|", "\\|")
