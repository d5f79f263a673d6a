"""llama.cpp as a contender, in its own environment: the standard library and llama_cpp only.

    python -m benchmarks.peers.llama_cpp FORMAT FILE '{"threads": 2}'
    python -m benchmarks.peers.llama_cpp FORMAT FILE --quantise

FILE is the checkpoint in bfloat16 (``gguf_file.py``). FORMAT: q8_0 or q4_k_m, which llama.cpp makes beside it at the
first call; or bf16, the file as it is. --quantise makes that file, and ends.
"""

import ctypes
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.orders import take_orders
from benchmarks.requests import Arrivals, mixed

FILE_TYPES = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
_CONTEXT = 2048 + 64  # tokens of one sequence
_BATCH = 2048  # tokens that go into one call
_REQUEST = 1024  # tokens of one of the requests that arrive together, at most


def quantised(lib: Any, file: Path, format_: str) -> Path:
    """Return the file in a format, made if need be. lib: llama_cpp. Raises SystemExit if llama.cpp refuses."""
    if format_ == "bf16":
        return file
    made = file.with_name(f"{file.stem}-{format_}.gguf")
    if not made.is_file():
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, FILE_TYPES[format_])
        new = made.with_suffix(".new")
        if lib.llama_model_quantize(str(file).encode(), str(new).encode(), ctypes.byref(params)):
            raise SystemExit(f"llama.cpp cannot quantise {file}")
        new.rename(made)
    return made


class LlamaCpp:
    """``llama_decode`` as llama-bench calls it: token ids in, no sampling."""

    def __init__(self, file: Path, format_: str, threads: int) -> None:
        self.lib: Any = importlib.import_module("llama_cpp")
        self.lib.llama_backend_init()
        path = str(quantised(self.lib, file, format_)).encode()
        self.model = self.lib.llama_model_load_from_file(path, self.lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {file}")
        self.threads = threads
        self.contexts: dict[tuple[int, int], Any] = {}

    def _context(self, batch: int, tokens: int = _CONTEXT) -> Any:
        """For so many sequences of so many tokens, empty."""
        if (batch, tokens) not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx = batch * tokens
            params.n_seq_max = batch
            params.n_batch = _BATCH
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[batch, tokens] = self.lib.llama_init_from_model(self.model, params)
        context = self.contexts[batch, tokens]
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)
        return context

    def run(self, work: str, batch: int, length: int, tokens: int) -> Any:
        """Seconds of a prefill, or of the steps after it; of requests, what ``Arrivals`` tells."""
        if work == "requests":
            return self._serve(batch)
        context = self._context(batch)
        start = time.perf_counter()
        for sequence in range(batch):
            self._decode(
                context, [(1000 + at % 1000, at, sequence, at == length - 1) for at in range(length)]
            )
        if work == "prefill":
            return time.perf_counter() - start
        start = time.perf_counter()
        for step in range(tokens):
            self._decode(context, [(1000 + step, length + step, sequence, True) for sequence in range(batch)])
        return time.perf_counter() - start

    def _serve(self, count: int) -> dict[str, Any]:
        """Requests of mixed lengths, batched as llama-server does: a token of each sequence that decodes, and behind
        them as much of the prompts that wait as there is room for."""
        requests, context = mixed(count), self._context(count, _REQUEST)
        read, made = [0] * count, [0] * count
        arrivals = Arrivals(count)
        while unfinished := [one for one in range(count) if made[one] < requests[one][1]]:
            rows: list[tuple[int, int, int, bool]] = []
            for one in unfinished:
                if read[one] == requests[one][0]:
                    rows.append((1000 + made[one], read[one] + made[one] - 1, one, True))
            for one in unfinished:
                length = requests[one][0]
                until = min(length, read[one] + _BATCH - len(rows))
                rows += [(1000 + at, at, one, at == length - 1) for at in range(read[one], until)]
                read[one] = max(until, read[one])
            self._decode(context, rows)
            for _, _, one, is_answered in rows:
                if is_answered:
                    made[one] += 1
                    arrivals.note(one, 1)
        return arrivals.answer()

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, whether logits are wanted)."""
        batch = self.lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wanted
        failed = self.lib.llama_decode(context, batch)
        self.lib.llama_synchronize(context)
        self.lib.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama_decode gives {failed}")


def main() -> None:
    format_, file, options = sys.argv[1:]
    if options == "--quantise":
        quantised(importlib.import_module("llama_cpp"), Path(file), format_)
        return
    take_orders(lambda: LlamaCpp(Path(file), format_, **json.loads(options)))


if __name__ == "__main__":
    main()
