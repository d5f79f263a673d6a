"""One GGUF file through LMDeploy on the CPU and through llama.cpp: prompt and decoding speed of one sequence.

    python -m benchmarks.gguf FILE.gguf [--prompt 512] [--new 64] [--rounds 3] [--threads N]
    python -m benchmarks.gguf --write q8_0 OUT.gguf

``--write`` makes a random file of Qwen2.5-0.5B's shape (q4_0 or q8_0), so that no download is needed. llama.cpp comes
from the package llama-cpp-python (``pip install llama-cpp-python`` compiles it). Each engine runs in a process of its
own, one after the other, and the rounds take turns. The table shows the median and the range of the rounds, and the
largest memory of each process. A loaded machine gives other numbers: run it on an idle one, and look at the ranges.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 151936
SHAPE = {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "head_size": 64}
ENGINES = ("lmdeploy", "llama.cpp")


def write(kind: str, path: Path) -> None:
    """Write a random model of Qwen2.5-0.5B's shape whose matrices are all of one type."""
    import gguf
    import numpy as np

    rng, of = np.random.default_rng(0), gguf.GGMLQuantizationType[kind.upper()]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(4096)
    writer.add_embedding_length(SHAPE["hidden"])
    writer.add_block_count(SHAPE["layers"])
    writer.add_feed_forward_length(SHAPE["inner"])
    writer.add_head_count(SHAPE["heads"])
    writer.add_head_count_kv(SHAPE["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 324)]]
    words = [f"w{number}" for number in range(VOCABULARY - len(letters) - 1)]
    writer.add_token_list([*letters, "ab", *words])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)

    def matrix(name: str, rows: int, columns: int) -> None:
        numbers = rng.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        writer.add_tensor(name, gguf.quantize(numbers, of), raw_dtype=of)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    hidden, inner = SHAPE["hidden"], SHAPE["inner"]
    of_queries, of_keys = (SHAPE[name] * SHAPE["head_size"] for name in ("heads", "kv_heads"))
    matrix("token_embd.weight", VOCABULARY, hidden)
    vector("output_norm.weight", hidden, 1)
    for layer in range(SHAPE["layers"]):
        block = f"blk.{layer}"
        for name, rows in (("q", of_queries), ("k", of_keys), ("v", of_keys)):
            matrix(f"{block}.attn_{name}.weight", rows, hidden)
            vector(f"{block}.attn_{name}.bias", rows, 0)
        matrix(f"{block}.attn_output.weight", hidden, of_queries)
        matrix(f"{block}.ffn_gate.weight", inner, hidden)
        matrix(f"{block}.ffn_up.weight", inner, hidden)
        matrix(f"{block}.ffn_down.weight", hidden, inner)
        vector(f"{block}.attn_norm.weight", hidden, 1)
        vector(f"{block}.ffn_norm.weight", hidden, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- one engine, in a process of its own


def text(size: int, seed: int) -> str:
    """Return a text of so many letters, another one for each seed, so that no cache of prompts answers it."""
    letters = random.Random(seed)
    return "".join(letters.choices("defghijklmnopq", k=size))


def by_lmdeploy(file: Path, size: int, new: int, threads: int) -> dict[str, float]:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

    config = PytorchEngineConfig(device_type="cpu", session_len=2048, max_batch_size=1)
    with pipeline(str(file), backend_config=config) as pipe:  # pyright: ignore[reportCallIssue]

        def seconds(count: int, seed: int) -> tuple[float, int]:
            options = GenerationConfig(max_new_tokens=count, do_sample=False, ignore_eos=True)
            begin = time.perf_counter()
            answer = pipe([text(size, seed)], gen_config=options, do_preprocess=False)[0]
            return time.perf_counter() - begin, answer.input_token_len

        seconds(2, 0)
        (one, tokens), (whole, _) = seconds(1, 1), seconds(new + 1, 2)
    return {"prompt": tokens / one, "decode": new / max(whole - one, 1e-9)}


def by_llama_cpp(file: Path, size: int, new: int, threads: int) -> dict[str, float]:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    llama = Llama(str(file), n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def seconds(count: int, seed: int) -> tuple[float, int]:
        prompt = llama.tokenize(text(size, seed).encode(), add_bos=False)
        begin = time.perf_counter()
        for number, _ in enumerate(llama.generate(prompt, temp=0.0), start=1):
            if number == count:
                break
        return time.perf_counter() - begin, len(prompt)

    seconds(2, 0)
    (one, tokens), (whole, _) = seconds(1, 1), seconds(new + 1, 2)
    return {"prompt": tokens / one, "decode": new / max(whole - one, 1e-9)}


def run(engine: str, arguments: argparse.Namespace) -> None:
    """Print one engine's result as JSON: tokens a second of the prompt and of decoding, and the memory in MB."""
    measure = by_lmdeploy if engine == "lmdeploy" else by_llama_cpp
    result = measure(arguments.file, arguments.prompt, arguments.new, arguments.threads)
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps(result))


def asked(engine: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Run one engine in a process; return its result, or None with its last line if it failed."""
    command = [sys.executable, "-m", "benchmarks.gguf", str(arguments.file), "--engine", engine]
    for name in ("prompt", "new", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    print(f"{engine} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", choices=("q4_0", "q8_0"), help="write a random file instead")
    parser.add_argument("--prompt", type=int, default=512, help="letters of the prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        write(arguments.write, arguments.file)
        return
    if arguments.engine:
        run(arguments.engine, arguments)
        return
    results: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for _ in range(arguments.rounds):
        for engine in ENGINES:
            if result := asked(engine, arguments):
                results[engine].append(result)
    print(f"{'':10} {'prompt tokens/s':>24} {'decoded tokens/s':>24} {'MB':>8}")
    for engine, rounds in results.items():
        if rounds:
            shown = []
            for name in ("prompt", "decode"):
                rates = sorted(result[name] for result in rounds)
                shown.append(f"{statistics.median(rates):.1f} ({rates[0]:.1f}-{rates[-1]:.1f})")
            memory = statistics.median(result["memory"] for result in rounds)
            print(f"{engine:10} {shown[0]:>24} {shown[1]:>24} {memory:8.0f}")


if __name__ == "__main__":
    main()
