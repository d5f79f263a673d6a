"""How far the plan of ``dlinfer preflight`` is from what an engine takes: six models, each in a process of its own.

    python -m benchmarks.preflight_plan [--only NAME ...] [--graph]

For each model the plan's peak and its part for serving stand beside VmHWM and VmRSS of a process that has answered four
prompts of 991 tokens, with ``session_len=2048`` and ``max_batch_size=4``; MiB. The exit status is 1 where the peak is
off by more than ``BOUND``. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.timing import publish

BOUND = 0.10
MIB = 1 << 20
ENGINE: dict[str, Any] = {"session_len": 2048, "max_batch_size": 4, "max_prefill_token_num": 1024}
PROMPTS, LENGTH, NEW = 4, 991, 8
WORDS = "the quick brown fox jumps over a lazy dog while two red hens watch and some green frogs sing".split()

_LLAMA = {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 1024, "intermediate_size": 2816}
_LLAMA |= {"num_hidden_layers": 8, "vocab_size": 32000}
_TIED = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "intermediate_size": 4864}
_TIED |= {"num_hidden_layers": 12, "vocab_size": 64000, "tie_word_embeddings": True}
_MIXTRAL = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 1792}
_MIXTRAL |= {"num_hidden_layers": 4, "vocab_size": 32000, "num_local_experts": 8}

# Name -> family of the tiny models, transformers' class, dtype, changes to the tiny configuration, bytes of a file.
MODELS: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "tiny llama": ("llama", "Llama", "float32", {}, "50GB"),
    "tiny qwen2": ("qwen2", "Qwen2", "bfloat16", {}, "50GB"),
    "llama": ("llama", "Llama", "bfloat16", _LLAMA, "50GB"),
    "llama in files": ("llama", "Llama", "float32", _LLAMA, "170MB"),
    "qwen2, tied": ("qwen2", "Qwen2", "bfloat16", _TIED, "50GB"),
    "mixtral": ("mixtral", "Mixtral", "bfloat16", _MIXTRAL, "50GB"),
}


def write(name: str, folder: Path) -> None:
    """Write a checkpoint of random weights."""
    import torch
    import transformers

    from examples.tiny_models import tokenizer
    from examples.tiny_models.families import FAMILIES

    family, hf_name, dtype, changes, shard = MODELS[name]
    model_class = getattr(transformers, f"{hf_name}ForCausalLM")
    config = model_class.config_class(**FAMILIES[family].config | changes)
    torch.set_default_dtype(getattr(torch, dtype))
    model_class(config).save_pretrained(folder, max_shard_size=shard)
    tokenizer.train().save_pretrained(folder)


def serve(folder: Path, dtype: str, eager: bool) -> dict[str, int]:
    """Answer the prompts, and say what this process takes."""
    from lmdeploy import GenerationConfig, PytorchEngineConfig
    from lmdeploy.api import pipeline

    config = PytorchEngineConfig(device_type="cpu", dtype=dtype, eager_mode=eager, **ENGINE)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, ignore_eos=True)
    with pipeline(str(folder), backend_config=config) as pipe:
        tokenizer = pipe.async_engine.tokenizer
        texts = [text_of(tokenizer, LENGTH, start) for start in range(PROMPTS)]
        answers: Any = pipe(texts, gen_config=generation, do_preprocess=False)
        assert all(LENGTH - 9 <= answer.input_token_len <= LENGTH for answer in answers)
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Vm")}
    return {"peak": found["VmHWM"], "serving": found["VmRSS"]}


def text_of(tokenizer: Any, tokens: int, start: int) -> str:
    """Words of so many tokens, or a few less: what is decoded from tokens may be encoded in others."""
    words = [WORDS[(start + i) % len(WORDS)] for i in range(tokens)]
    while len(tokenizer.encode(" ".join(words))) > tokens:
        words.pop()
    return " ".join(words)


def plan(folder: Path, dtype: str, eager: bool) -> dict[str, int]:
    """What preflight says."""
    from dlinfer.framework.lmdeploy_ext.preflight.check import preflight

    report = preflight(folder, "cpu", dtype=dtype, eager_mode=eager, **ENGINE)
    memory = report.memory
    assert memory is not None, report.refusals
    parts = ("process", "graphs", "weights", "kv_cache", "activations", "logits")
    return {"peak": memory.peak, "serving": sum(getattr(memory, part) for part in parts)}


JOBS = {"write": write, "serve": serve, "plan": plan}


def in_a_process(job: str, *arguments: Any) -> Any:
    """The result of one of ``JOBS``."""
    command = [sys.executable, "-m", "benchmarks.preflight_plan", "--job", json.dumps([job, *arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(name: str, eager: bool) -> dict[str, Any]:
    """Plan and measurement of one model."""
    dtype = MODELS[name][2]
    with tempfile.TemporaryDirectory() as temp:
        folder = f"{temp}/model"
        in_a_process("write", name, folder)
        planned = in_a_process("plan", folder, dtype, eager)
        measured = in_a_process("serve", folder, dtype, eager)
    row: dict[str, Any] = {"model": f"{name}, {dtype}", "mode": "eager" if eager else "graph"}
    for what in ("peak", "serving"):
        row[f"{what} planned"] = planned[what] // MIB
        row[f"{what} measured"] = measured[what] // MIB
        row[f"{what} error %"] = round(100 * (planned[what] / measured[what] - 1), 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--graph", action="store_true", help="in graph mode, compiling in the process")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job, *arguments = json.loads(args.job)
        paths = [Path(one) if isinstance(one, str) and one.startswith("/") else one for one in arguments]
        print(json.dumps(JOBS[job](*paths)))
        return 0
    rows = [row_of(name, not args.graph) for name in args.only]
    publish("what preflight plans and what an engine takes, MiB", rows)
    return int(any(abs(row["peak error %"]) > 100 * BOUND for row in rows))


if __name__ == "__main__":
    sys.exit(main())
