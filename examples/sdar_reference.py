"""What block diffusion (SDAR) says: greedy tokens of transformers' Qwen3 and Qwen3-MoE, for comparing an engine with.

``run`` answers a job as ``hf_reference.run`` does, in a process that sees neither LMDeploy nor dlinfer. Every step
computes the whole text again, with an explicit mask and without a cache. Fields of a job:

``prompts`` and ``max_new_tokens``
    lists of token ids (or strings, tokenised without special tokens added); one int, or one for each prompt.
``diffusion``
    ``block_length``; ``mask_token``; ``strategy``, as LMDeploy calls it; ``denoising_steps``, a divisor of the
    block's length; ``threshold`` of confidence.
``stops``, ``least``
    token ids that end an answer, none by default; and the number of tokens before which they are never chosen.
``never``
    token ids that are never chosen.

The answer has for prompt i: ``prompt_i`` and ``tokens_i`` int64, and ``gap_i``, the smallest distance of two numbers
whose order decided a token or its turn. Source of the algorithm: SDAR (2025, arXiv:2510.06303) and its published
generation script.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def visible(tokens: int, block: int) -> torch.Tensor:
    """An additive mask [1, 1, tokens, tokens]: a token sees its own block and every block before it."""
    number = torch.arange(tokens) // block
    sees = number[:, None] >= number
    return torch.zeros(1, 1, tokens, tokens).masked_fill(~sees, torch.finfo(torch.float32).min)


class Diffusion:
    """Continues one text, block by block."""

    def __init__(self, model: Any, job: dict[str, Any]) -> None:
        self.model, how = model, job["diffusion"]
        self.block, self.mask = how["block_length"], how["mask_token"]
        self.strategy = how.get("strategy", "low_confidence_dynamic")
        self.at_once = self.block // how.get("denoising_steps", self.block)
        self.threshold = how.get("threshold", 0.85)
        self.stops, self.least, self.never = job.get("stops", []), job.get("least", 0), job.get("never", [])
        self.gap = float("inf")

    @torch.inference_mode()
    def continued(self, prompt: list[int], count: int) -> list[int]:
        """The answer's tokens: ``count``, or as many as there are up to a stop."""
        text, begin = list(prompt), len(prompt) // self.block * self.block
        while len(text) - len(prompt) < count:
            known = text[begin:]
            text = text[:begin] + self._filled(text[:begin], known, begin - len(prompt))
            begin += self.block
            answer = text[len(prompt) :][:count]
            ends = [place for place, token in enumerate(answer) if token in self.stops]
            if ends:
                return answer[: ends[0] + 1]
        return text[len(prompt) :][:count]

    def _filled(self, before: list[int], known: list[int], offset: int) -> list[int]:
        """One block whose first tokens are known. offset: what to add to a token's place to have it in the answer."""
        block = torch.tensor(known + [self.mask] * (self.block - len(known)))
        open_ = torch.arange(self.block) >= len(known)
        while open_.any():
            ids = torch.cat([torch.tensor(before, dtype=torch.long), block])[None]
            places = torch.arange(ids.shape[1])[None]
            logits = self.model(
                ids, attention_mask=visible(ids.shape[1], self.block), position_ids=places, use_cache=False
            ).logits[0, -self.block :]
            logits[:, self.never] = -torch.inf
            early = torch.arange(self.block) + offset < self.least
            for stop in self.stops:
                logits[early, stop] = -torch.inf
            best = logits[open_].topk(2).values
            self._note(best[:, 0] - best[:, 1])
            sure, tokens = logits.softmax(-1).max(-1)
            chosen = self._chosen(sure.masked_fill(~open_, -1.0), open_)
            block = torch.where(chosen, tokens, block)
            open_ = open_ & ~chosen
        return block.tolist()

    def _chosen(self, sure: torch.Tensor, open_: torch.Tensor) -> torch.Tensor:
        """Which open tokens of a block are decided now. sure: their confidence, below 0 for tokens that are known."""
        if self.strategy == "sequential":
            return open_ & (open_.cumsum(0) <= self.at_once)
        if self.strategy == "low_confidence_dynamic":
            self._note((sure[open_] - self.threshold).abs())
            above = sure > self.threshold
            if above.sum() >= self.at_once:
                return above
        order = sure.sort(descending=True)
        now = min(self.at_once, int(open_.sum()))
        if now < open_.sum():
            self._note(order.values[now - 1] - order.values[now])
        return torch.zeros_like(open_).index_fill(0, order.indices[:now], True)

    def _note(self, gaps: torch.Tensor) -> None:
        self.gap = min(self.gap, gaps.min().item())


def run(model_folder: Path, job: dict[str, Any]) -> dict[str, np.ndarray]:
    """Answer a job (see the module's docstring) as the arrays of OUT.npz."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    counts, answer = job["max_new_tokens"], {}
    for i, prompt in enumerate(job["prompts"]):
        ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        diffusion = Diffusion(model, job)
        tokens = diffusion.continued(ids, counts[i] if isinstance(counts, list) else counts)
        answer |= {f"prompt_{i}": np.asarray(ids), f"tokens_{i}": np.asarray(tokens)}
        answer[f"gap_{i}"] = np.asarray(diffusion.gap)
    return answer
