"""transformers' answers, job by job, from a process that never sees LMDeploy or dlinfer.

A job is ``{"runs": [[MODEL_FOLDER, JOB, OUT.npz], ...]}``; what these are is said in ``examples/hf_reference.py``, and
for jobs of chats in ``examples/hf_vision_reference.py``.
"""

from pathlib import Path
from typing import Any

import numpy as np

from examples import hf_reference, hf_vision_reference
from tests.jobs import answer_jobs


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answer each run; a file is written whole or not at all."""
    hf_reference.check_alone()
    for model, asked, out in job["runs"]:
        oracle = hf_vision_reference if "chats" in asked else hf_reference
        arrays = oracle.run(Path(model), asked)
        np.savez(out, **arrays)  # pyright: ignore[reportArgumentType]
    return {}


if __name__ == "__main__":
    answer_jobs(answer)
