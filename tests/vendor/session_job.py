"""Another process: ``python -m tests.vendor.session_job FOLDER INPUT`` loads FOLDER/model.dlinfer and runs it.

FOLDER/inputs.npz has an array for each call, which the input named INPUT takes; results.npz gets the results.
"""

import sys
from pathlib import Path

import numpy as np

import dlinfer


def main(folder: Path, name: str) -> None:
    session = dlinfer.load(folder / "model.dlinfer")
    results = {}
    for call, array in np.load(folder / "inputs.npz").items():
        (result,) = session.run({name: array}).values()
        results[call] = np.asarray(result)
    np.savez(folder / "results.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
