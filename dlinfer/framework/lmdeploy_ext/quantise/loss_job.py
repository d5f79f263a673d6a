"""The process in which LMDeploy serves a model for ``loss``: of a folder's job.json it makes answer.json.

The first writes its logits into the folder; the others compare theirs with them, a window at a time.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def main(folder: Path) -> None:
    """Serve the job's model, and measure."""
    from lmdeploy import PytorchEngineConfig
    from lmdeploy.api import pipeline

    job = json.loads((folder / "job.json").read_text())
    windows: list[list[int]] = job["windows"]
    longest = max(map(len, windows))
    config = PytorchEngineConfig(
        device_type="cpu",  # of the settings that are measured
        eager_mode=True,
        max_batch_size=1,
        session_len=2 * longest,
        num_gpu_blocks=32,
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
    answer = {"perplexity": math.exp(loss / sum(len(window) - 1 for window in windows))}
    (folder / "answer.json").write_text(json.dumps(answer | ({} if job["is_first"] else sums.means())))


def _logits(pipe: Any, window: list[int]) -> Tensor:
    """The logits, float32 [tokens, vocabulary], of a window."""
    coroutine = pipe.async_engine.async_get_logits(input_ids=[window])
    return pipe._run(coro=coroutine).result()[0].float()


class Sums:
    """What is added up over rows of logits."""

    def __init__(self) -> None:
        self.rows, self.same, self.worst = 0, 0, 0.0
        self.error, self.norm, self.divergence = 0.0, 0.0, 0.0

    def add(self, want: Tensor, got: Tensor) -> None:
        """Compare rows [tokens, vocabulary], float32."""
        for row, its in zip(want, got, strict=True):  # a row at a time: vocabularies are large
            one, other = row.double(), its.double()
            centred, apart = one - one.mean(), other - one
            self.rows += 1
            self.same += int(one.argmax() == other.argmax())
            self.worst = max(self.worst, float(apart.abs().max()))
            self.norm += float(centred.square().sum())
            self.error += float((apart - apart.mean()).square().sum())
            first, second = one.log_softmax(0), other.log_softmax(0)
            self.divergence += float((first.exp() * (first - second)).sum())

    def means(self) -> dict[str, float]:
        """The fields of ``Way``."""
        return {
            "logit_error": math.sqrt(self.error / self.norm) if self.norm else 0.0,
            "worst_logit": self.worst,
            "divergence": self.divergence / max(self.rows, 1),
            "same_token": self.same / max(self.rows, 1),
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
