"""Bars of tokens per second, ours beside each peer, in an environment that has matplotlib.

python plot.py FILE.json, which ``report.py`` wrote; the drawing goes beside it.
"""

import json
import sys
from pathlib import Path

import matplotlib  # pyright: ignore[reportMissingImports] - of its own environment

matplotlib.use("svg")
from matplotlib import pyplot  # pyright: ignore[reportMissingImports]


def draw(path: Path) -> None:
    found = json.loads(path.read_text())
    precisions = list(found["rows"])
    figure, axes = pyplot.subplots(len(precisions), 1, figsize=(10, 3.2 * len(precisions)), squeeze=False)
    for axis, precision in zip(axes[:, 0], precisions, strict=True):
        rows = found["rows"][precision]
        works = list(dict.fromkeys(row["work"] for row in rows))
        names = ["ours", *dict.fromkeys(row["peer"] for row in rows)]
        width = 0.8 / len(names)
        for at, name in enumerate(names):
            heights = []
            for work in works:
                mine = [row for row in rows if row["work"] == work]
                rates = {row["peer"]: row["peer tok/s"] for row in mine} | {"ours": mine[0]["ours tok/s"]}
                heights.append(rates.get(name, 0.0))
            places = [place + (at - len(names) / 2 + 0.5) * width for place in range(len(works))]
            bars = axis.bar(places, heights, width, label=name)
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        if precision == "bf16":
            limit = found["read bandwidth"] / found["weights"]
            for place, work in enumerate(works):
                if work.startswith("decode batch 1 "):
                    axis.hlines(limit, place - 0.4, place + 0.4, linestyles="dotted", label="memory's limit")
        axis.set_yscale("log")
        axis.set_xticks(range(len(works)), works)
        axis.set_ylabel("tokens per second")
        axis.set_title(precision, loc="left")
        axis.legend(fontsize=7, ncols=4)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
