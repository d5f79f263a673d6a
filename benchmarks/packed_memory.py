"""Resident memory of LMDeploy on the CPU with weights of few bits, against what has to be there.

    python -m benchmarks.packed_memory [--packings awq int8 float8 blocked static experts alone floats8 floats4
                                                   floats12]
                                       [--modes eager first graph]

For each packing a Llama of hidden size 2048 is written (for experts a Qwen3-MoE: in AWQ, or as compressed-tensors has
experts alone), whose layers hold random packed numbers of some hundred MB, and served in a process of its own with four
prompts at once; one more process serves the same packing with a model of one tiny layer. That second process's memory
is the baseline (Python, torch, LMDeploy, threads, tokenizer, the compiler) and is subtracted. What remains may be
``BOUND`` times the bytes of the weight file and of the KV cache: a float copy of the weights, or a repacked one beside
the original, would be far above that.

Modes: eager; first: graph mode in a process that compiles; graph: graph mode in one that finds what was compiled.

The table is in MiB. prompts: tokens of all four. before: resident before the engine starts. peak: VmHWM, which while
loading counts pages of the mapped file too. after: VmRSS when the prompts are answered; of it, anon: memory of its own,
file: pages of files. over: after - baseline. ratio: over / (weights + cache), and whether it is inside the bound. The
exit status is 1 where one is not. The last line is JSON.

floats8, floats4 and floats12 are checkpoints in floats that DLINFER_CPU_WEIGHTS packs while they load: weights are
their packed bytes, and the peak has to be inside the bound too, of those bytes, the largest tensor of the file and the
cache; for floats12 also of gate and up, which are packed together.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import usual_dtype
from benchmarks.timing import publish
from dlinfer.framework.lmdeploy_ext.conversion.formats import W8A8, AwqInt4, BlockedFp8
from dlinfer.ops.quantised import bf12
from dlinfer.settings import cache_folder

BOUND = 1.15
MIB = 1 << 20
MODES = ("eager", "first", "graph")
ENGINE = {"session_len": 512, "max_batch_size": 4, "max_prefill_token_num": 512}
LENGTHS, TOKENS = (8, 32, 64, 128), 16

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
TINY = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DTYPES = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F16": torch.float16, "F32": torch.float32}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
}
ALONE: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
}

Parts = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Packing:
    """How a checkpoint is packed. config: its ``quantization_config``. bits: of a weight, without scales. experts: how
    many each layer has, 0 for none. setting: value of DLINFER_CPU_WEIGHTS that packs it while it loads from floats.
    """

    config: dict[str, Any]
    bits: int
    experts: int = 0
    setting: str = ""

    def parts(self, name: str, rows: int, columns: int) -> Parts:
        """The tensors of a weight [rows, columns]: last part of the name -> safetensors' dtype, and shape."""
        if self.setting:
            return {"weight": ("BF16", (rows, columns))}
        method, dtype = self.config["quant_method"], self.config.get("quant_dtype")
        if method == "compressed-tensors" and ".experts." not in name:
            return {"weight": ("BF16", (rows, columns))}
        if method == "compressed-tensors":
            return {
                "weight_packed": ("I32", (rows, columns // 8)),
                "weight_scale": ("BF16", (rows, columns // INT4["group_size"])),
                "weight_shape": ("I32", (2,)),
            }
        if method == "awq":
            return AwqInt4().parts(rows, columns)
        if method == "smooth_quant":
            parts = W8A8().parts(rows, columns)
            return parts if dtype == "int8" else parts | {"weight": ("F8_E4M3", (rows, columns))}
        if "weight_block_size" in self.config:
            return BlockedFp8().parts(rows, columns)
        return {
            "weight": ("F8_E4M3", (rows, columns)),
            "weight_scale": ("F32", ()),
            "input_scale": ("F32", ()),
        }


PACKINGS = {
    "awq": Packing(AwqInt4().config(), 4),
    "int8": Packing(W8A8().config(), 8),
    "float8": Packing({"quant_method": "smooth_quant", "quant_dtype": "float8_e4m3fn"}, 8),
    "blocked": Packing(BlockedFp8().config(), 8),
    "static": Packing({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static"}, 8),
    "experts": Packing(AwqInt4().config(), 4, 16),
    "alone": Packing(ALONE, 4, 16),
    "floats8": Packing(W8A8().config(), 8, setting="int8"),
    "floats4": Packing(AwqInt4().config(), 4, setting="int4"),
    "floats12": Packing({}, 12, setting="bf12"),
}


# --- checkpoints


def linears(sizes: dict[str, int], experts: int = 0) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of one layer; those of experts are half as wide as hidden states."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    found = {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    found |= {f"self_attn.{one}_proj": (keys, hidden) for one in "kv"}
    inner = hidden // 2 if experts else inner
    for parent in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        found |= {f"{parent}.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        found[f"{parent}.down_proj"] = (hidden, inner)
    return found


def layers_of(megabytes: int, packing: Packing) -> int:
    """How many layers of ``SIZES`` take so many MB."""
    numbers = sum(math.prod(size) for size in linears(SIZES, packing.experts).values())
    return max(1, round(megabytes * 8e6 / packing.bits / numbers))


def write_model(folder: Path, packing: Packing, sizes: dict[str, int], layers: int, dtype: str) -> int:
    """Write a checkpoint of random packed numbers. Returns the bytes of its weight file."""
    from safetensors.torch import save_file

    from examples.tiny_models.build import build

    tiny = folder.with_name(f"{folder.name}-tokenizer")
    build("llama", tiny)
    folder.mkdir()
    for path in tiny.glob("tokenizer*"):
        shutil.copy(path, folder)
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    shutil.rmtree(tiny)
    stored = "float16" if packing.config.get("quant_method") == "awq" and not packing.setting else dtype
    whole = CONFIG | sizes | {"vocab_size": vocabulary, "num_hidden_layers": layers, "dtype": stored}
    if packing.experts:
        heads = sizes["hidden_size"] // sizes["num_attention_heads"]
        whole |= MOE | {"num_experts": packing.experts, "head_dim": heads}
        whole["moe_intermediate_size"] = sizes["hidden_size"] // 2
    quantised = {} if packing.setting else {"quantization_config": packing.config}
    (folder / "config.json").write_text(json.dumps(whole | quantised))
    tensors = dict(weights(packing, sizes, layers, vocabulary, getattr(torch, stored)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").stat().st_size


def weights(
    packing: Packing, sizes: dict[str, int], layers: int, vocabulary: int, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a checkpoint, by name."""
    torch.manual_seed(0)
    hidden = sizes["hidden_size"]
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", torch.randn(vocabulary, hidden).to(dtype) * 0.02
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
    for layer in range(layers):
        before = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{before}.{name}.weight", torch.ones(hidden, dtype=dtype)
        if packing.experts:
            yield f"{before}.mlp.gate.weight", torch.randn(packing.experts, hidden).to(dtype) * 0.02
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                yield (
                    f"{before}.{name}.weight",
                    torch.ones(hidden // sizes["num_attention_heads"], dtype=dtype),
                )
        for name, (rows, columns) in linears(sizes, packing.experts).items():
            for part, (kind, shape) in packing.parts(name, rows, columns).items():
                is_shape = part == "weight_shape"
                made = torch.tensor([rows, columns], dtype=torch.int32) if is_shape else numbers(kind, shape)
                yield f"{before}.{name}.{part}", made


def numbers(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of packed numbers, or of scales that keep sums small."""
    if kind in ("F16", "F32", "BF16"):
        return torch.full(shape, 1e-3 if shape else 1e-2, dtype=DTYPES[kind])
    if kind == "I32":
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    if kind == "I8":
        return torch.randint(-127, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(DTYPES[kind])


# --- a process that serves one


def status() -> dict[str, int]:
    """Bytes of this process: VmRSS, VmHWM, RssAnon, RssFile, RssShmem."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if words and words[-1] == "kB"}


def serve(folder: str, mode: str, dtype: str) -> dict[str, Any]:
    """Answer prompts in this process; what it held before, at most, and after, and bytes of its KV cache."""
    from lmdeploy import GenerationConfig, PytorchEngineConfig
    from lmdeploy.api import pipeline

    before = status()["VmRSS"]
    options: dict[str, Any] = {"dtype": dtype, "eager_mode": mode == "eager", **ENGINE}
    with pipeline(folder, backend_config=PytorchEngineConfig(device_type="cpu", **options)) as pipe:
        tokenizer = pipe.async_engine.tokenizer
        texts = [tokenizer.decode(list(range(10, 10 + length))) for length in LENGTHS]
        config = GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True, do_sample=False)
        pipe(texts, gen_config=config, do_preprocess=False)
        answers: Any = pipe(texts, gen_config=config, do_preprocess=False)
        assert all(answer.generate_token_len == TOKENS for answer in answers)
        prompts = sum(answer.input_token_len for answer in answers)
        found = {"before": before, "prompts": prompts, **status()}
        engine: Any = pipe.async_engine.engine
        return found | {"cache": cache_bytes(engine.executor.model_agent.cache_engine)}


def cache_bytes(engine: Any) -> int:
    """Bytes of the memory that the keys and values of LMDeploy's CacheEngine lie in."""
    stores = [one.untyped_storage() for layer in engine.gpu_cache for one in layer]
    return sum({store.data_ptr(): store.nbytes() for store in stores}.values())


# --- the comparison


def packed_bytes(packing: Packing, file: Path) -> int:
    """Bytes of what a file in floats becomes: linear layers packed, the projection in int8 or with them, the rest as it
    is."""
    from safetensors import safe_open

    form, total = (W8A8() if packing.bits == 8 else AwqInt4()), 0
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no dict
            shape = tuple(opened.get_slice(name).get_shape())
            parts: Parts = {"weight": ("BF16", shape)}
            is_linear = "_proj" in name or name == "lm_head.weight"
            if is_linear and packing.setting == "bf12":
                parts = {"weight": ("U8", (bf12.packed_bytes(*shape),))}
            elif "_proj" in name:
                parts = form.parts(*shape)
            elif name == "lm_head.weight":
                parts = W8A8().parts(*shape)
            total += sum(math.prod(one) * DTYPES[kind].itemsize for kind, one in parts.values())
    return total


def asked(folder: Path, mode: str, dtype: str, setting: str = "") -> dict[str, Any]:
    """What a process of its own says that serves a folder."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.packed_memory",
        "--dtype",
        dtype,
        "--serve",
        str(folder),
        mode,
    ]
    compiled = folder.with_name(f"{folder.name}-compiled")
    if mode == "first":
        shutil.rmtree(compiled, ignore_errors=True)
    elif mode == "graph" and not (compiled / "done").exists():
        asked(folder, "first", dtype, setting)
    compiled.mkdir(exist_ok=True)
    for name in ("native", "selftest"):  # of the machine, and not of a model
        kept, linked = cache_folder() / name, compiled / name
        kept.mkdir(parents=True, exist_ok=True)
        if not linked.exists():
            linked.symlink_to(kept)
    environment = os.environ | {"DLINFER_CACHE_DIR": str(compiled), "DLINFER_CPU_WEIGHTS": setting}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    if mode == "first":
        (compiled / "done").touch()
    return json.loads(out.strip().splitlines()[-1])


def measure(name: str, modes: list[str], megabytes: int, dtype: str, root: Path) -> Iterator[dict[str, Any]]:
    """A row for each mode of one packing; its models are made under ``root`` and removed."""
    packing = PACKINGS[name]
    large, tiny = root / f"{name}-large", root / f"{name}-tiny"
    size = write_model(large, packing, SIZES, layers_of(megabytes, packing), dtype)
    write_model(tiny, packing, TINY, 1, dtype)
    room = 0.0
    if packing.setting:
        size = packed_bytes(packing, large / "model.safetensors")
        room = 2 * math.prod(max(linears(SIZES).values(), key=math.prod))
        room *= 3 if packing.setting == "bf12" else 1
    for mode in modes:
        empty, found = asked(tiny, mode, dtype, packing.setting), asked(large, mode, dtype, packing.setting)
        baseline = empty["VmRSS"]
        over, due = found["VmRSS"] - baseline, size + found["cache"]
        load = found["VmHWM"] - empty["VmHWM"]
        is_inside = over <= BOUND * due and (not packing.setting or load <= BOUND * (due + room))
        yield {
            "packing": name,
            "mode": mode,
            "weights": size / MIB,
            "cache": found["cache"] / MIB,
            "prompts": found["prompts"],
            "before": found["before"] / MIB,
            "peak": found["VmHWM"] / MIB,
            "after": found["VmRSS"] / MIB,
            "anon": found["RssAnon"] / MIB,
            "file": found["RssFile"] / MIB,
            "baseline": baseline / MIB,
            "over": over / MIB,
            "ratio": f"{over / due:.3f}",
            "at the peak": f"{load / (due + room):.3f}",
            "inside": "PASS" if is_inside else "FAIL",
        }
    for made in root.glob(f"{name}-*"):
        shutil.rmtree(made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=list(PACKINGS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--megabytes", type=int, default=400, help="of packed weights, roughly")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default=usual_dtype())
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(serve(args.serve[0], args.serve[1], args.dtype)))
        return
    with tempfile.TemporaryDirectory(prefix="dlinfer-packed-") as folder:
        rows = [
            row
            for name in args.packings
            for row in measure(name, args.modes, args.megabytes, args.dtype, Path(folder))
        ]
    publish(f"resident memory of packed weights, activations in {args.dtype}", rows)
    if any(row["inside"] == "FAIL" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
