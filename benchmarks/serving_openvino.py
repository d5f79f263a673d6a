"""LMDeploy on our openvino engine against LMDeploy on our inductor engine, and against OpenVINO GenAI.

    python -m benchmarks.serving_openvino [--precisions bfloat16 float32 int4] [--genai PYTHON] [--pairs 15]
        [--model FOLDER]

By default on the shape of Qwen2.5-0.5B. ``--genai`` is the interpreter of an environment with openvino-genai and
optimum-intel, which export the model once for each precision. Decoding at batch 1 and 8 and a prefill of 512 tokens,
interleaved; prints median ratios with their 95 % interval, a table and a line of JSON for each precision. int4 are
weights alone: the rest is computed in ``--int4-in``, and the inductor engine beside it has its weights in that.
"""

import argparse
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.arena import Entry, measure
from benchmarks.models import qwen2_half_billion
from benchmarks.serving import rows_of
from benchmarks.timing import publish

OURS = "openvino"
PRECISIONS = ("bfloat16", "float32", "int4")
SHORT = {"bfloat16": "bf16", "float32": "f32"}
EXPORTED = {"bfloat16": "fp16", "float32": "fp32", "int8": "int8", "int4": "int4"}
"""What optimum-cli calls the weights; it keeps bfloat16 ones as fp16, of the same size."""


def orders(length: int, tokens: int) -> list[dict[str, Any]]:
    """Decoding at batch 1 and 8, and a prefill of ``length`` tokens."""
    return [
        {"work": "decode", "batch": 1, "length": 8, "tokens": tokens},
        {"work": "decode", "batch": 8, "length": 8, "tokens": max(1, tokens // 2)},
        {"work": "prefill", "batch": 1, "length": length, "tokens": 1},
    ]


def exported(model: Path, python: str, precision: str) -> Path:
    """The folder of the model as GenAI reads it; made at the first call, in GenAI's own environment."""
    folder = model.with_name(f"{model.name}-openvino-{EXPORTED[precision]}")
    if not (folder / "openvino_model.xml").is_file():
        command = [str(Path(python).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
        command += [
            "--task",
            "text-generation-with-past",
            "--weight-format",
            EXPORTED[precision],
            str(folder),
        ]
        subprocess.run(command, check=True)
    return folder


def entries(model: Path, precision: str, computed_in: str, genai: str) -> list[Entry]:
    """Who takes part: ours first."""
    dtype = {"dtype": computed_in}
    engine = {"DLINFER_ENGINE": "openvino"}
    if precision == "int4":
        engine["DLINFER_ENGINE_OPTIONS"] = "weights=int4"
    found = [
        Entry(OURS, "lmdeploy-graph", model, dtype, environment=engine),
        Entry("inductor", "lmdeploy-graph", model, dtype, environment={"DLINFER_ENGINE": "inductor"}),
    ]
    if genai:
        folder = exported(model, genai, precision)
        options = {"precision": SHORT[computed_in]}
        found += [
            Entry(f"genai {backend}", backend, folder, options, module="benchmarks.genai", python=genai)
            for backend in ("PA", "SDPA")
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--int4-in", choices=list(SHORT), default="bfloat16", help="what int4 is computed in")
    parser.add_argument("--genai", default="", metavar="PYTHON", help="interpreter of GenAI's environment")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--length", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--tokens", type=int, default=24, help="decoding steps at batch 1; half of it at 8")
    parser.add_argument("--model", type=Path, default=Path.home() / ".cache" / "dlinfer-bench" / "qwen2-0.5b")
    args = parser.parse_args()
    is_model = (args.model / "config.json").is_file()
    model = args.model if is_model else qwen2_half_billion(args.model)
    work = orders(args.length, args.tokens)
    for precision in args.precisions:
        computed_in = args.int4_in if precision == "int4" else precision
        taking_part = entries(model, precision, computed_in, args.genai)
        _, results = measure(taking_part, work, args.pairs)
        names = [entry.name for entry in taking_part]
        publish(f"LMDeploy on the openvino engine, {precision}", rows_of(names, work, results, OURS))


if __name__ == "__main__":
    main()
