"""PEFT's side of the adapters' tests: it makes adapters and says what a model generates with each, and with none.

A job is ``{"model": FOLDER, "out": FOLDER, "adapters": {NAME: [TARGETS, RANK, ALPHA, OPTIONS]}, "prompts": [...],
"new": N, "never": [...], "vision": whether the model takes images}``. OPTIONS, which may be left out, are more keywords
of ``LoraConfig``. The adapters go to ``out/NAME``, as PEFT saves them, with weights that change what is said.
``out/said.json`` maps each name, and "" for the model alone, to the greedy tokens of each prompt; those of ``never``
are not chosen.
"""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from examples import hf_reference
from tests.jobs import answer_jobs


def load(job: dict[str, Any]) -> Any:
    makes = AutoModelForImageTextToText if job.get("vision") else AutoModelForCausalLM
    return makes.from_pretrained(job["model"], dtype=torch.float32).eval()


@torch.no_grad()
def make(job: dict[str, Any], name: str) -> None:
    targets, rank, alpha, *options = job["adapters"][name]
    more = options[0] if options else {}
    model = get_peft_model(load(job), LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **more))
    torch.manual_seed(rank)
    for key, weight in model.named_parameters():
        if "lora_magnitude" in key:
            weight.mul_(1 + 0.3 * torch.randn_like(weight))
        elif "lora_" in key:
            weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(str(Path(job["out"], name)))


@torch.no_grad()
def greedy(model: Any, prompt: list[int], job: dict[str, Any]) -> list[int]:
    """Without a cache, so that nothing is shared with what is tested but the layers."""
    ids = list(prompt)
    for _ in range(job["new"]):
        logits = model(torch.tensor([ids])).logits[0, -1]
        logits[job["never"]] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def answer(job: dict[str, Any]) -> dict[str, Any]:
    hf_reference.check_alone()
    said = {"": [greedy(load(job), prompt, job) for prompt in job["prompts"]]}
    for name in job["adapters"]:
        make(job, name)
        model = PeftModel.from_pretrained(load(job), Path(job["out"], name)).eval()
        said[name] = [greedy(model, prompt, job) for prompt in job["prompts"]]
    Path(job["out"], "said.json").write_text(json.dumps(said))
    return {}


if __name__ == "__main__":
    answer_jobs(answer)
