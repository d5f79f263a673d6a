"""The oracle of quantised checkpoints: transformers' models with simulated layers, in a process without LMDeploy.

A job is ``{"model": FOLDER, "method": METHOD, "prompts": [[ID, ...], ...], "new": COUNT, "out": FILE.npz}``. The file
holds, for prompt i, tokens_i, gap_i (of the two best logits at each step) and logits_i of the prompt with its tokens.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples import hf_reference
from tests.e2e.quantised_model import simulated_model
from tests.jobs import answer_jobs


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Answer a job."""
    hf_reference.check_alone()
    torch.set_grad_enabled(False)
    model = simulated_model(Path(job["model"]), job["method"])
    arrays: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(job["prompts"]):
        tokens, gap = hf_reference.greedy(model, prompt, job["new"], ends=[2, 4])
        arrays[f"tokens_{i}"], arrays[f"gap_{i}"] = tokens, gap
        arrays[f"logits_{i}"], _ = hf_reference.score(model, [*prompt, *tokens.tolist()])
    np.savez(job["out"], **arrays)  # pyright: ignore[reportArgumentType]
    return {}


if __name__ == "__main__":
    answer_jobs(answer)
