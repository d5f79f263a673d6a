"""``make demo``: unmodified LMDeploy generates on a CPU, and transformers in another process says the same.

    python examples/demo.py [--model MODEL_FOLDER] [--tokens N]

Without a folder (also taken from the environment variable MODEL) a small Llama first learns the Zen of Python by
heart; no network is used. Exit status: 0 when the greedy tokens are equal, or differ first where transformers' own
two best candidates are closer than rounding (16-bit checkpoints only); 1 when they differ; 2 when there is nothing
to run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent

PROMPTS = [
    "hello",
    "the quick brown fox",
    "Large language models serve many users from one cache of keys and values. " * 4,
    "Beautiful is better than",
]
"""The demo prints the answer to the last one."""

# Two of transformers' scores this close may change places when the same 16-bit numbers are summed in another
# order: logits of real models reach 32, where neighbouring bfloat16 numbers are 2**-3 (float16: 2**-6) apart.
# float32 checkpoints get no such excuse.
TIES = {"bfloat16": 4 * 2.0**-3, "float16": 4 * 2.0**-6}


def die(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_folder(folder: Path) -> None:
    """Leave with one clear line for what cannot be a checkpoint, before anything slow is imported."""
    if not folder.is_dir():
        die(f"model folder {folder} does not exist")
    if not (folder / "config.json").is_file():
        die(f"{folder} has no config.json: not a Hugging Face checkpoint")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        die(f"{folder} has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        die(f"{folder} has no tokenizer (tokenizer.json or tokenizer.model)")


def trained_model(console: Console) -> Path:
    """Return the demo's own checkpoint in the user's cache folder. The first call trains it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "dlinfer" / "demo-zen"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with console.status("a small Llama learns the Zen of Python by heart"):
        done = subprocess.run(
            [sys.executable, "-m", "trained_model", str(folder), "--zen"],
            cwd=EXAMPLES,
            env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        die(f"training the model failed: {done.stderr.strip().splitlines()[-1]}")
    console.print(f"model: {done.stdout.strip().splitlines()[-1]}")
    return folder


def generate(model: Path, max_new_tokens: int, console: Console) -> list[list[int]]:
    """LMDeploy's greedy tokens for PROMPTS, streamed. The one thing that says "CPU" is ``device_type``."""
    with console.status("loading LMDeploy and the model"):
        start = time.perf_counter()
        from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

        config = PytorchEngineConfig(device_type="cpu")
        pipe = pipeline(str(model), backend_config=config)  # pyright: ignore[reportCallIssue]
    console.print(f"loaded in {time.perf_counter() - start:.1f} s")

    tokens: list[list[int]] = [[] for _ in PROMPTS]
    first_token = None
    start = time.perf_counter()
    gen_config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, ignore_eos=True)
    console.print(PROMPTS[-1][:80], end="", style="bold", markup=False, highlight=False)
    with pipe:
        for response in pipe.stream_infer(PROMPTS, gen_config=gen_config, do_preprocess=False):
            if response.error_code:
                die(f"LMDeploy refused prompt {response.index}: {response.error_message}")
            tokens[response.index] += response.token_ids
            if response.token_ids and first_token is None:
                first_token = time.perf_counter() - start
            if response.index == len(PROMPTS) - 1:  # one of the streams, as it comes
                console.print(response.text, end="", style="cyan", markup=False, highlight=False)
        seconds = time.perf_counter() - start
    total = sum(map(len, tokens))
    console.print(
        f"\n{total} tokens for {len(PROMPTS)} prompts in {seconds:.2f} s: {total / seconds:.1f} tokens/s,"
        f" the first after {first_token or 0:.2f} s"
    )
    return tokens


def reference(model: Path, max_new_tokens: int, console: Console) -> dict[str, np.ndarray]:
    """transformers' greedy tokens for PROMPTS, from a process that never sees LMDeploy or dlinfer."""
    with tempfile.TemporaryDirectory() as temp, console.status("asking transformers in another process"):
        job, out = Path(temp, "job.json"), Path(temp, "out.npz")
        job.write_text(json.dumps({"prompts": PROMPTS, "max_new_tokens": max_new_tokens}))
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "hf_reference.py"), str(model), str(job), str(out)],
            env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            die(f"transformers could not run the model: {done.stderr.strip().splitlines()[-1]}")
        with np.load(out) as arrays:
            return dict(arrays)


def verdict(tokens: list[list[int]], hf: dict[str, np.ndarray], console: Console) -> int:
    """Print the comparison; the exit status."""
    tie = TIES.get(str(hf["dtype"]), 0.0)
    table = Table("prompt", "tokens", "verdict", title=f"LMDeploy on CPU against transformers, {hf['dtype']}")
    status, ties = 0, False
    for i, ours in enumerate(tokens):
        theirs, gaps = hf[f"tokens_{i}"].tolist(), hf[f"gap_{i}"]
        at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if ours == theirs:
            said = "[green]equal"
        elif at is not None and gaps[at] < tie:
            ties = True
            said = f"tie at {at}: {ours[at]} | {theirs[at]}, gap {gaps[at]:.3f} < {tie}"
        else:
            status = 1
            at = min(len(ours), len(theirs)) if at is None else at
            here, there = ours[at : at + 1] or ["end"], theirs[at : at + 1] or ["end"]
            gap = f"{gaps[at]:.4f}" if at < len(gaps) else "none"
            said = f"[red]differs at {at}: LMDeploy {here[0]}, transformers {there[0]} (its top-2 gap {gap})"
        table.add_row(PROMPTS[i][:32], str(len(ours)), said)
    console.print(table)
    alike = "[bold green]equal but for ties" if ties else "[bold green]equal"
    console.print(alike if status == 0 else "[bold red]different")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=os.environ.get("MODEL"), help="a Hugging Face checkpoint folder")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    args = parser.parse_args()
    if args.tokens < 1:
        die(f"--tokens must be at least 1, got {args.tokens}")
    console = Console()
    if args.model:
        check_folder(model := Path(args.model).expanduser())
    else:
        model = trained_model(console)
    tokens = generate(model, args.tokens, console)
    return verdict(tokens, reference(model, args.tokens, console), console)


if __name__ == "__main__":  # LMDeploy's worker processes import this file again
    sys.exit(main())
