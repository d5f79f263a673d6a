"""Serves a model with LMDeploy in a separate process, for ``loss.py``."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.quantise.job import answer


def main(folder: Path, job: dict[str, Any]) -> dict[str, float]:
    """Serve the job's model, run it on the job's windows of tokens, and return its perplexity.

    The first job runs the stored model and saves its logits. Later jobs run packed models, and also return how their
    logits differ from the saved ones.
    """
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.api import pipeline

    windows: list[list[int]] = job["windows"]
    longest = max(map(len, windows))
    config = PytorchEngineConfig(
        device_type="cpu",  # DLINFER_CPU_WEIGHTS and DLINFER_CPU_HEAD need it
        eager_mode=True,
        max_batch_size=1,
        session_len=2 * longest,
        num_gpu_blocks=32,
        quant_policy=job.get("quant_policy", 0),
    )
    with pipeline(job["folder"], backend_config=config) as pipe:
        loss, sums = 0.0, Sums()
        for number, window in enumerate(windows):
            logits = _logits(pipe, window)
            loss += float(nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum"))
            kept = folder / f"{number}.pt"
            if job["is_first"]:
                torch.save(logits, kept)
            else:
                sums.add(torch.load(kept, weights_only=True), logits)
    perplexity = math.exp(loss / sum(len(window) - 1 for window in windows))
    return {"perplexity": perplexity} | ({} if job["is_first"] else sums.means())


def _logits(pipe: Any, window: list[int]) -> Tensor:
    """Return a window's logits, float32 [tokens, vocabulary]."""
    coroutine = pipe.async_engine.async_get_logits(input_ids=[window])
    return pipe._run(coro=coroutine).result()[0].float()


class Sums:
    """Accumulates the differences between rows of two models' logits."""

    def __init__(self) -> None:
        self.rows, self.same, self.worst = 0, 0, 0.0
        self.error, self.norm, self.divergence = 0.0, 0.0, 0.0

    def add(self, want: Tensor, got: Tensor) -> None:
        """Add the differences between two models' logits, float32 [tokens, vocabulary]. want: the stored model's."""
        for rows in zip(want, got, strict=True):  # a row at a time: vocabularies are large
            row, other = (each.double() for each in rows)
            centred, apart = row - row.mean(), other - row
            self.rows += 1
            self.same += int(row.argmax() == other.argmax())
            self.worst = max(self.worst, float(apart.abs().max()))
            self.norm += float(centred.square().sum())
            self.error += float((apart - apart.mean()).square().sum())
            first, second = row.log_softmax(0), other.log_softmax(0)
            self.divergence += float((first.exp() * (first - second)).sum())

    def means(self) -> dict[str, float]:
        """Return the fields of ``loss.Way``, except head and perplexity."""
        return {
            "logit_error": math.sqrt(self.error / self.norm) if self.norm else 0.0,
            "worst_logit": self.worst,
            "divergence": self.divergence / max(self.rows, 1),
            "same_token": self.same / max(self.rows, 1),
        }


if __name__ == "__main__":
    answer(main)
