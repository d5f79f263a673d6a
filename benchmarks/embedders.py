"""One way of computing embeddings, in a process of its own, which takes orders as ``benchmarks.orders`` says.

    python -m benchmarks.embedders KIND MODEL_FOLDER [JSON]

An order is {"texts": n}. The answer has the seconds, the seconds of all CPUs, and the number of tokens. Its ``alike``
is the least cosine between the vectors and those of transformers in float32. ``benchmarks.embeddings.KINDS`` are the
kinds.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.embeddings import WORDS
from benchmarks.orders import take_orders

Embed = Callable[[Sequence[str]], Tensor]
BATCH = 32  # sentence-transformers' own batch


def texts_of(count: int) -> list[str]:
    """Texts of 3 to 250 words, half of them shorter than 30, as queries and passages are. The same at each call."""
    draw = random.Random(0)
    lengths = [min(250, max(3, round(draw.lognormvariate(3.4, 1.0)))) for _ in range(count)]
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(length)) for length in lengths]


def dlinfer(folder: Path, dtype: Any) -> Embed:
    from dlinfer.embedding import load

    return load(folder, dtype=dtype).encode


def sentence_transformers(folder: Path, dtype: str) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    return partial(model.encode, batch_size=BATCH, convert_to_tensor=True, show_progress_bar=False)


def openvino(folder: Path, precision: str, batch: int) -> Embed:
    """OpenVINO on transformers' model: sorted by length, padded batches, the mean of the tokens, length 1."""
    import openvino as ov
    from transformers import AutoModel, AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    names = ["input_ids", "attention_mask"]
    example = words(["w1 w2", "w3"], padding=True, return_tensors="pt")
    with torch.no_grad():
        network = ov.convert_model(model, example_input={name: example[name] for name in names})
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    hints["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
    compiled = ov.compile_model(network, "CPU", hints)
    del model

    def embed(texts: Sequence[str]) -> Tensor:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors = np.empty((len(texts), 768), np.float32)
        for first in range(0, len(texts), batch):
            chosen = order[first : first + batch]
            encoded = words([texts[index] for index in chosen], padding=True, return_tensors="np")
            hidden = compiled({name: encoded[name] for name in names})[0]
            mask = encoded["attention_mask"][..., None]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            vectors[chosen] = mean / np.linalg.norm(mean, axis=-1, keepdims=True)
        return torch.from_numpy(vectors)

    return embed


MAKERS: dict[str, Callable[[Path], Embed]] = {
    "dlinfer": partial(dlinfer, dtype="float32"),
    "dlinfer-bf16": partial(dlinfer, dtype="bfloat16"),
    "sentence-transformers": partial(sentence_transformers, dtype="float32"),
    "sentence-transformers-bf16": partial(sentence_transformers, dtype="bfloat16"),
    "openvino": partial(openvino, precision="f32", batch=BATCH),
    "openvino-single": partial(openvino, precision="f32", batch=1),
    "openvino-bf16": partial(openvino, precision="bf16", batch=BATCH),
}


class Embedder:
    """A contender. It keeps what the vectors ought to be, in a file beside the model."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._folder = folder
        self._embed = MAKERS[kind](folder)

    def run(self, texts: int) -> dict[str, Any]:
        given = texts_of(texts)
        begun, busy = time.perf_counter(), time.process_time()
        vectors = self._embed(given)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - busy
        expected = self._expected(given)
        alike = torch.nn.functional.cosine_similarity(vectors.float(), expected).min()
        tokens = sum(len(text.split()) + 2 for text in given)
        return {"seconds": seconds, "cpu": cpu, "tokens": tokens, "alike": round(float(alike), 6)}

    def _expected(self, texts: Sequence[str]) -> Tensor:
        file = self._folder / f"expected-{len(texts)}.pt"
        if not file.exists():
            from transformers import AutoModel, AutoTokenizer

            words, model = (
                AutoTokenizer.from_pretrained(self._folder),
                AutoModel.from_pretrained(self._folder),
            )
            with torch.inference_mode():
                rows = [
                    model(**words(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts
                ]
            torch.save(torch.stack(rows), file)
        return torch.load(file)


if __name__ == "__main__":
    kind, model = sys.argv[1:3]
    take_orders(lambda: Embedder(kind, Path(model)))  # pyright: ignore[reportArgumentType] - orders of its own
