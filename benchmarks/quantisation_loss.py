"""Perplexity of a text, and the change of the logits, with each way to serve a model in fewer bits.

    python -m benchmarks.quantisation_loss MODEL [--text FILE] [--tokens 4096] [--calibrate FILE] [--outliers 16]

MODEL is a Llama, Qwen2, Qwen3 or Mistral folder in bfloat16, such as that of `python -m examples.trained_model`.
`dlinfer quantise --loss` measures the same, but for int8 and int4 alone. The output projection is quantised only in
rows that say "head".

--outliers N measures the model once more with outlier features: the norms before two linear layers give 0.1 % of the
features (at least two) times N, and the layers take as much less of them. A power of two changes no logit of floats.
The last line is JSON.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.timing import publish
from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4, BlockedFp8
from dlinfer.framework.lmdeploy_ext.quantise import job
from dlinfer.framework.lmdeploy_ext.quantise.calibration import Calibration
from dlinfer.framework.lmdeploy_ext.quantise.loss import windows_of
from dlinfer.framework.lmdeploy_ext.quantise.run import quantise

WEIGHTS, HEAD, ACTIVATIONS = "DLINFER_CPU_WEIGHTS", "DLINFER_CPU_HEAD", "DLINFER_CPU_ACTIVATIONS"
SETTINGS: dict[str, dict[str, str]] = {
    "bf12": {WEIGHTS: "bf12"},
    "int8": {WEIGHTS: "int8"},
    "int8, head int8": {WEIGHTS: "int8", HEAD: "int8"},
    "int4": {WEIGHTS: "int4"},
    "int4, head int8": {WEIGHTS: "int4", HEAD: "int8"},
    "int4, activations int8": {WEIGHTS: "int4", ACTIVATIONS: "int8"},
}
POLICIES = (8, 4, 16, 17)
AFTER_NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def ways(model: Path, work: Path, calibrate: Path | None) -> Iterator[tuple[str, Path, dict[str, str], int]]:
    """Yield (name, folder, settings, quant_policy) of each way, that of the stored model first."""
    yield "as it is stored", model, {WEIGHTS: "kept"}, 0
    for name, settings in SETTINGS.items():
        yield name, model, settings, 0
    quantise(model, work / "fp8", BlockedFp8())
    yield "fp8", work / "fp8", {}, 0
    if calibrate is not None:
        quantise(model, work / "calibrated", AwqInt4(), calibration=Calibration(calibrate))
        yield "awq-int4, calibrated", work / "calibrated", {}, 0
    for policy in POLICIES:
        yield f"quant_policy {policy}", model, {}, policy


def measured(model: Path, windows: list[list[int]], calibrate: Path | None) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="quantisation-loss-") as temporary:
        work = Path(temporary)
        for number, (name, folder, settings, policy) in enumerate(ways(model, work, calibrate)):
            order = {"folder": str(folder.resolve()), "windows": windows, "is_first": not number}
            answer = job.run(
                "loss_job",
                work,
                order | {"quant_policy": policy},
                None,
                **{WEIGHTS: "", HEAD: "kept", ACTIVATIONS: "", **settings},
            )
            print(name, answer, flush=True)
            yield {
                "way": name,
                "perplexity": f"{answer['perplexity']:.2f}",
                "logit error %": f"{100 * answer['logit_error']:.2f}" if number else "",
                "same token %": f"{100 * answer['same_token']:.1f}" if number else "",
            }


def write_with_outliers(model: Path, out: Path, times: int) -> None:
    """Write the same model with outlier features in the inputs of its linear layers, but o and down."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out)
    tensors = load_file(model / "model.safetensors")
    for name, norm in tensors.items():
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in AFTER_NORMS:
            count = max(round(norm.numel() / 1000), 2)
            some = norm.float().abs().topk(count).indices
            norm[some] *= times
            for layer in AFTER_NORMS[kind]:
                tensors[f"{prefix}.{layer}.weight"][:, some] /= times
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="a UTF-8 file (default: Python's own help)")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--calibrate", type=Path, help="a text, for int4 that is calibrated")
    parser.add_argument("--outliers", type=int, help="a power of two")
    args = parser.parse_args()
    windows = windows_of(args.model, args.text, args.tokens)
    rows = [{"model": "as it is", **row} for row in measured(args.model, windows, args.calibrate)]
    if args.outliers:
        with tempfile.TemporaryDirectory() as temporary:
            out = Path(temporary) / "model"
            write_with_outliers(args.model, out, args.outliers)
            named = f"outliers x {args.outliers}"
            rows += [{"model": named, **row} for row in measured(out, windows, args.calibrate)]
    publish(f"loss of quantisation, {args.model.name}", rows)


if __name__ == "__main__":
    main()
