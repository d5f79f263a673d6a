"""Runs auto-round in a separate process. ``calibration`` writes its input, tokens.pt, into the process's folder.

tokens.pt holds two tensors, the samples to calibrate with and the held-out samples.
"""

import importlib.util
import math
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4, pieces
from dlinfer.framework.lmdeploy_ext.quantise.job import answer

_PIECE = 1 << 22  # elements of a weight that are in float32 at a time


def main(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Calibrate a model. Return the folder that auto-round wrote, and three perplexities on held-out text.

    The perplexities are of the unquantised model, the model rounded to the nearest, and the calibrated model.
    """
    tokens = torch.load(folder / "tokens.pt", weights_only=True)
    form = AwqInt4(job["group_size"])
    written = _calibrated(job, tokens["samples"], form, folder / "written")
    model = _model(job)
    perplexity = {"floats": _perplexity(model, tokens["held_out"])}
    _replace(model, job["names"], lambda name, weight: form.dequantise(form.quantise(weight)))
    perplexity["nearest"] = _perplexity(model, tokens["held_out"])
    stored = _stored(written)

    def as_written(name: str, weight: Tensor) -> Tensor:
        layer = name.removesuffix("weight")
        return form.dequantise({part: stored(f"{layer}{part}") for part in form.parts(*weight.shape)})

    _replace(model, job["names"], as_written, whole=True)
    perplexity["calibrated"] = _perplexity(model, tokens["held_out"])
    return {"written": str(written), "perplexity": perplexity}


def _calibrated(job: Any, samples: Tensor, form: AwqInt4, out: Path) -> Path:
    """Quantise the model with auto-round, and return the folder that auto-round wrote inside ``out``."""
    _stand_in_for_datasets()
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["folder"], local_files_only=True)
    rounding: Any = AutoRound(
        _model(job),
        tokenizer,
        bits=4,
        group_size=form.group_size,
        sym=False,
        dataset=list(samples.split(1)),
        seqlen=samples.shape[1],
        nsamples=len(samples),
        batch_size=min(8, len(samples)),
        iters=job["steps"],
        device_map="cpu",
        enable_torch_compile=False,
    )
    _, written = rounding.quantize_and_save(str(out), format="auto_awq")
    return Path(written)


def _stand_in_for_datasets() -> None:
    """Put a placeholder for the package ``datasets`` into sys.modules, if it is not installed.

    auto-round imports ``datasets``, which needs pandas and pyarrow, to download text. Here the user gives the text.
    """
    if importlib.util.find_spec("datasets") is not None:
        return
    module = types.ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    names = "Dataset Features IterableDataset Sequence Value concatenate_datasets load_dataset load_from_disk"
    for name in names.split():
        setattr(module, name, type(name, (), {}))
    sys.modules["datasets"] = module


def _model(job: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job["folder"], dtype="auto", local_files_only=True).eval()


def _stored(folder: Path) -> Callable[[str], Tensor]:
    from safetensors import safe_open

    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        opened: Any = safe_open(path, framework="pt")
        files |= dict.fromkeys(opened.keys(), opened)
    return lambda name: files[name].get_tensor(name)


@torch.no_grad()
def _replace(
    model: nn.Module, names: list[str], change: Callable[[str, Tensor], Tensor], whole: bool = False
) -> None:
    """Overwrite each named weight with ``change(name, weight)``.

    whole: whether to pass a whole weight at once, not some rows at a time.
    """
    parameters = dict(model.named_parameters())
    for name in names:
        weight = parameters[name]
        for piece in [weight] if whole else pieces(weight, _PIECE):
            piece.copy_(change(name, piece))


@torch.no_grad()
def _perplexity(model: Any, samples: Tensor) -> float:
    loss = torch.zeros((), dtype=torch.float64)
    for tokens in samples:
        logits = model(tokens[None]).logits[0, :-1].float()
        loss += nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
    return math.exp(float(loss) / samples[:, 1:].numel())


if __name__ == "__main__":
    answer(main)
