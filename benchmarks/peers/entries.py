"""Who takes part for one precision: LMDeploy on the vendor cpu first, then the peers, each on the same weights."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.arena import Entry
from benchmarks.peers.environments import python_of
from benchmarks.serving_openvino import exported
from benchmarks.timing import threads

OURS = "dlinfer"
PRECISIONS = ("bf16", "int8", "int4")
EVERY_PRECISION = ("f32", *PRECISIONS)
"""f32 where it is asked for: it is for processors without instructions for bfloat16."""
PEERS = ("genai", "llama.cpp", "transformers")

_WEIGHTS = "DLINFER_CPU_WEIGHTS"
_GGUF = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_k_m"}
_EXPORTED = {"f32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}


def entries(
    model: Path, precision: str, peers: tuple[str, ...], transformers: Mapping[str, str]
) -> list[Entry]:
    """model: the checkpoint in bfloat16, from which each peer makes its own once.

    transformers: names of contenders that are transformers', and their kinds.
    """
    computed_in = "f32" if precision == "f32" else "bf16"
    dtype = {"dtype": {"f32": "float32", "bf16": "bfloat16"}[computed_in]}
    found = [Entry(OURS, "lmdeploy-graph", model, dtype, environment=_ours(precision))]
    if "genai" in peers:
        python = python_of("genai")
        folder = exported(model, python, _EXPORTED[precision])
        found += [
            Entry(
                f"genai {backend}",
                backend,
                folder,
                {"precision": computed_in},
                module="benchmarks.genai",
                python=python,
            )
            for backend in ("SDPA", "PA")
        ]
    if "llama.cpp" in peers and precision != "f32":
        python = python_of("llama.cpp")
        file = gguf_of(model, python)
        options = {"threads": threads()}
        kind = _GGUF[precision]
        module = "benchmarks.peers.llama_cpp"
        found.append(Entry(f"llama.cpp {kind}", kind, file, options, module=module, python=python))
    if "transformers" in peers and precision == "bf16":
        found += [Entry(name, kind, model) for name, kind in transformers.items()]
    return found


def _ours(precision: str) -> dict[str, str]:
    if precision == "f32":
        return {}
    if precision == "bf16":  # auto, kept and bf12 are the same numbers
        return {_WEIGHTS: os.environ.get(_WEIGHTS, "auto")}
    # OpenVINO rounds what meets weights of 8 and 4 bits by default, llama.cpp always; ours what meets 8 bits.
    rounds = {"DLINFER_CPU_ACTIVATIONS": "int8"} if precision == "int4" else {}
    return {_WEIGHTS: precision, "DLINFER_CPU_HEAD": "int8"} | rounds


def gguf_of(model: Path, python: str) -> Path:
    """Return the checkpoint as a GGUF file in bfloat16, made if need be. python: llama.cpp's interpreter."""
    file = model.with_name(f"{model.name}-bf16.gguf")
    if not file.is_file():
        new = file.with_suffix(".new")
        subprocess.run([python, "-m", "benchmarks.peers.gguf_file", str(model), str(new)], check=True)
        new.rename(file)
    return file
