"""Another process: loads every artifact of a folder, runs it on the inputs beside it and writes the results.

Inputs are ``<model>.in.npz`` with arrays ``<input's name>.<call>``; results go to ``<model>.out.npz`` by call.
"""

import sys
from pathlib import Path

import numpy as np

import dlinfer


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.dlinfer")):
        session = dlinfer.load(path)
        results = {}
        for key, array in np.load(path.with_suffix(".in.npz")).items():
            name, call = key.rsplit(".", 1)
            (result,) = session.run({name: array}).values()
            results[call] = np.asarray(result)
        np.savez(path.with_suffix(".out.npz"), **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
