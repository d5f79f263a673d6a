"""transformers' answers, job by job, from a process that never sees LMDeploy or dlinfer.

A job is ``{"runs": [[MODEL_FOLDER, JOB, OUT.npz], ...]}``; what these are is said in ``examples/hf_reference.py``, and
for jobs of chats in ``examples/hf_vision_reference.py``. What transformers has no class for has an oracle of its own.
"""

from pathlib import Path
from typing import Any

import numpy as np

from examples import (
    cogvlm_reference,
    glm4v_reference,
    hf_reference,
    hf_vision_reference,
    kimi_k25_reference,
    sdar_reference,
)
from tests.jobs import answer_jobs


def _oracle(model: Path, asked: dict[str, Any]) -> Any:
    if "diffusion" in asked:
        return sdar_reference
    config = (model / "config.json").read_text()
    if "CogVLMForCausalLM" in config:
        return cogvlm_reference
    if "Kimi_K25ForConditionalGeneration" in config and "chats" in asked:
        return kimi_k25_reference
    around = model.parent / "config.json"
    if "chats" in asked and around.is_file() and "ChatGLMForConditionalGeneration" in around.read_text():
        return glm4v_reference
    return hf_vision_reference if "chats" in asked else hf_reference


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answer each run; a file is written whole or not at all."""
    hf_reference.check_alone()
    for model, asked, out in job["runs"]:
        arrays = _oracle(Path(model), asked).run(Path(model), asked)
        np.savez(out, **arrays)  # pyright: ignore[reportArgumentType]
    return {}


if __name__ == "__main__":
    answer_jobs(answer)
