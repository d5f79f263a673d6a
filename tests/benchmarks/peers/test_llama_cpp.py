"""What llama.cpp is told, by a library that remembers."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import llama_cpp
from benchmarks.peers.llama_cpp import LlamaCpp


class Library(types.ModuleType):
    """llama_cpp's functions, as far as the benchmark calls them."""

    LLAMA_FTYPE_MOSTLY_Q8_0 = 7
    LLAMA_FTYPE_MOSTLY_Q4_K_M = 15

    def __init__(self) -> None:
        super().__init__("llama_cpp")
        self.loaded: list[str] = []
        self.quantised: list[tuple[str, int]] = []
        self.contexts: list[Any] = []
        self.decoded: list[list[tuple[int, int, int, bool]]] = []
        self.cleared, self.freed, self.fails, self.loads = 0, 0, 0, True

    def llama_backend_init(self) -> None: ...

    def llama_model_default_params(self) -> Any:
        return object()

    def llama_model_load_from_file(self, path: bytes, params: Any) -> Any:
        self.loaded.append(path.decode())
        return "model" if self.loads else None

    def llama_model_quantize_default_params(self) -> Any:
        import ctypes

        class Params(ctypes.Structure):
            _fields_ = (("ftype", ctypes.c_int),)

        return Params()

    def llama_model_quantize(self, source: bytes, to: bytes, params: Any) -> int:
        self.quantised.append((source.decode(), params._obj.ftype))
        Path(to.decode()).write_text("quantised")
        return self.fails

    def llama_context_default_params(self) -> Any:
        return types.SimpleNamespace()

    def llama_init_from_model(self, model: Any, params: Any) -> Any:
        self.contexts.append(params)
        return params

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_clear(self, memory: Any, data: bool) -> None:
        self.cleared += 1

    def llama_batch_init(self, tokens: int, embd: int, sequences: int) -> Any:
        empty = [0] * tokens
        ids = [[-1] * sequences for _ in range(tokens)]
        return types.SimpleNamespace(
            n_tokens=0, token=empty[:], pos=empty[:], n_seq_id=empty[:], seq_id=ids, logits=empty[:]
        )

    def llama_decode(self, context: Any, batch: Any) -> int:
        assert batch.n_seq_id == [1] * batch.n_tokens
        rows = zip(batch.token, batch.pos, batch.seq_id, batch.logits, strict=True)
        self.decoded.append([(token, place, ids[0], wanted) for token, place, ids, wanted in rows])
        return self.fails

    def llama_synchronize(self, context: Any) -> None: ...

    def llama_batch_free(self, batch: Any) -> None:
        self.freed += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    return made


def test_a_prefill_of_two_sequences(library, tmp_path):
    seconds = LlamaCpp(tmp_path / "m.gguf", "bf16", 3).run("prefill", 2, 3, 1)
    assert seconds > 0
    assert library.loaded == [str(tmp_path / "m.gguf")] and library.quantised == []
    assert library.decoded == [
        [(1000, 0, sequence, False), (1001, 1, sequence, False), (1002, 2, sequence, True)]
        for sequence in (0, 1)
    ]
    (context,) = library.contexts
    assert (context.n_seq_max, context.n_threads, context.n_threads_batch) == (2, 3, 3)
    assert context.n_ctx >= 2 * 2048


def test_steps_of_decoding_stand_behind_the_prompt(library, tmp_path):
    contender = LlamaCpp(tmp_path / "m.gguf", "bf16", 3)
    for _ in range(2):
        library.decoded.clear()
        contender.run("decode", 2, 3, 4)
        assert library.decoded[2:] == [
            [(1000 + step, 3 + step, sequence, True) for sequence in (0, 1)] for step in range(4)
        ]
    assert len(library.contexts) == 1  # one a batch
    assert library.cleared == 2
    assert library.freed == 2 * (2 + 4)


@pytest.mark.parametrize(("format_", "kind"), [("q8_0", 7), ("q4_k_m", 15)])
def test_a_quantised_file_is_made_once(library, tmp_path, format_, kind):
    for _ in range(2):
        LlamaCpp(tmp_path / "m.gguf", format_, 1)
    assert library.quantised == [(str(tmp_path / "m.gguf"), kind)]
    assert library.loaded == [str(tmp_path / f"m-{format_}.gguf")] * 2


def test_failures_say_what_failed(library, tmp_path):
    contender = LlamaCpp(tmp_path / "m.gguf", "bf16", 1)
    library.fails = 2
    with pytest.raises(SystemExit, match="llama_decode gives 2"):
        contender.run("prefill", 1, 2, 1)
    with pytest.raises(SystemExit, match="cannot quantise"):
        LlamaCpp(tmp_path / "m.gguf", "q8_0", 1)
    assert not (tmp_path / "m-q8_0.gguf").exists()  # nothing half made under its name
    library.loads = False
    with pytest.raises(SystemExit, match="cannot load"):
        LlamaCpp(tmp_path / "m.gguf", "bf16", 1)


def test_requests_are_batched_as_a_server_does(library, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "_BATCH", 5)
    monkeypatch.setattr(llama_cpp, "mixed", lambda count: [(4, 3), (3, 2)][:count])
    told = LlamaCpp(tmp_path / "m.gguf", "bf16", 1).run("requests", 2, 0, 0)
    first = [(1000 + at, at, 0, at == 3) for at in range(4)]
    assert library.decoded == [
        [*first, (1000, 0, 1, False)],  # of the second prompt what there is room for
        [(1001, 4, 0, True), (1001, 1, 1, False), (1002, 2, 1, True)],  # a step beside the rest of it
        [(1002, 5, 0, True), (1001, 3, 1, True)],
    ]
    assert told["tokens"] == 3 + 2
    assert 0 < told["first"]["p50"] < told["seconds"]
