"""Calibrates AWQ's rounding: auto-round runs the model on a text to choose rounding directions and group ranges.

Method: SignRound, Cheng et al., 2023, arXiv:2309.05516. We chose auto-round because it writes AWQ's layout, and works
with the torch and transformers of LMDeploy 0.18. llm-compressor 0.14 needs transformers below 5.18, and writes
compressed-tensors. auto-round runs in a separate process, since it patches classes of transformers and builds the
model.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion import model_files
from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4, Format
from dlinfer.framework.lmdeploy_ext.errors import CalibrationError
from dlinfer.framework.lmdeploy_ext.quantise import job
from dlinfer.framework.lmdeploy_ext.quantise.source import Source, unsupported
from dlinfer.framework.lmdeploy_ext.quantise.tokens import read_text, tokens_of

PACKAGE = "auto_round"
_HELD_OUT = 16  # the most samples kept for measuring; also at most a ninth of all samples
_LEAST = 8  # the fewest tokens in a sample


@dataclass(frozen=True)
class Calibration:
    """The text of a calibration, and how much work to spend on it.

    text: a UTF-8 file, similar to the texts that the model will see. samples: the largest number of samples to cut from
    the text. length: tokens in a sample. steps: search steps for each layer.
    """

    text: Path
    samples: int = 128
    length: int = 512
    steps: int = 200


@dataclass(frozen=True)
class Perplexity:
    """Perplexities on held-out text: exp of the mean loss of a token.

    samples: how many samples auto-round used. floats: perplexity of the unquantised model. nearest: perplexity of the
    model rounded to the nearest. calibrated: perplexity of the model that auto-round rounded.
    """

    samples: int
    floats: float
    nearest: float
    calibrated: float


def check(form: Format, calibration: Calibration, source: Path) -> None:
    """Raise UnsupportedFeatureError if weights of this format cannot be calibrated.

    Raises CalibrationError if a number in ``calibration`` is too small, or if auto-round is not installed. source: the
    model folder, for error texts.
    """
    if not isinstance(form, AwqInt4):
        advice = (
            "leave --calibrate out: formats of 8 bits are close to the unquantised model without calibration"
        )
        raise unsupported(f"calibrating {form.name}", advice)
    for name, least in (("samples", 1), ("length", _LEAST), ("steps", 1)):
        if getattr(calibration, name) < least:
            raise _failed(
                source, f"{name} is {getattr(calibration, name)}, below {least}", f"use {least} or more"
            )
    if importlib.util.find_spec(PACKAGE) is None:
        raise _failed(source, "auto-round is not installed", 'run `pip install "dlinfer[quantise]"`')


@contextmanager
def calibrated(
    source: Source, form: Format, calibration: Calibration, beside: Path, tell: Callable[[str], None]
) -> Iterator[tuple[Callable[[str], dict[str, Tensor]], Perplexity]]:
    """Run auto-round. Yield a function that maps a weight's name to its calibrated tensors, and the perplexities.

    The function reads temporary files in the folder ``beside``. The end of the context deletes these files. tell:
    called with lines of progress. Raises CalibrationError if auto-round fails or its text is unusable. Raises
    ModelFolderError if the tokenizer does not load.
    """
    from safetensors import safe_open

    assert isinstance(form, AwqInt4)  # see ``check``
    samples, held_out = _samples(source, calibration)
    with tempfile.TemporaryDirectory(prefix=".dlinfer-calibration-", dir=beside) as temporary:
        folder = Path(temporary)
        torch.save({"samples": samples, "held_out": held_out}, folder / "tokens.pt")
        answer = _run(source, form, calibration, folder, tell)
        files: dict[str, Path] = {}
        for path in sorted(Path(answer["written"]).glob("*.safetensors")):
            files |= dict.fromkeys(model_files.header(path), path)
        dtypes = {torch.int32: "I32", torch.float16: "F16"}

        def parts(name: str) -> dict[str, Tensor]:
            tensors = {}
            for part, planned in form.parts(*source.tensors[name].shape).items():
                stored = f"{name.removesuffix('weight')}{part}"
                if stored not in files:
                    raise _failed(source.folder, f"auto-round did not write {stored}", _ANOTHER)
                with safe_open(files[stored], framework="pt") as file:
                    tensors[part] = file.get_tensor(stored)
                written = dtypes.get(tensors[part].dtype), tuple(tensors[part].shape)
                if written != planned:
                    raise _failed(
                        source.folder,
                        f"auto-round wrote {part} of {name} as {written} instead of {planned}",
                        _ANOTHER,
                    )
            return tensors

        yield parts, Perplexity(len(samples), **answer["perplexity"])


_ANOTHER = 'run `pip install "dlinfer[quantise]"` to get the tested auto-round, or leave --calibrate out'


def _failed(folder: Path, detail: str, advice: str) -> CalibrationError:
    return CalibrationError(path=str(folder), detail=detail, advice=advice)


def _samples(source: Source, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """Return two tensors of tokens: [samples, length] for calibration, and [held-out samples, length] for perplexities.

    Raises CalibrationError if the text cannot be read or is too short, or if the samples are longer than the model
    allows. Raises ModelFolderError if the tokenizer does not load.
    """
    text = read_text(calibration.text, source.folder, CalibrationError)
    first, tokens = tokens_of(source.folder, text)
    length, longest = calibration.length, source.config.get("max_position_embeddings") or calibration.length
    if length > longest:
        advice = f"use at most {longest}"
        raise _failed(
            source.folder, f"length is {length}, but the model has only {longest} positions", advice
        )
    step = length - len(first)
    pieces = [[*first, *tokens[at : at + step]] for at in range(0, len(tokens) - step + 1, step)]
    if len(pieces) < 2:
        detail = f"the text has {len(tokens)} tokens, but two samples take {2 * step}"
        raise _failed(source.folder, detail, "use a longer text, or a smaller --length")
    count = min(_HELD_OUT, max(1, len(pieces) // 9))
    return torch.tensor(pieces[:-count][: calibration.samples]), torch.tensor(pieces[-count:])


def _run(
    source: Source, form: AwqInt4, calibration: Calibration, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    layers, done = int(source.config["num_hidden_layers"]), 0

    def told(line: str) -> None:
        nonlocal done
        done += "layers in the block" in line  # auto-round prints it for each finished layer
        tell(f"calibrating layer {min(done + 1, layers)} of {layers}")

    request = {
        "folder": str(source.folder.resolve()),
        "names": sorted(source.quantised),
        "group_size": form.group_size,
        "steps": calibration.steps,
    }
    tell("calibrating")
    try:
        return job.run("calibration_job", folder, request, told)
    except job.JobError as error:
        advice = "use fewer --samples or a smaller --length, because memory may have run out"
        raise _failed(source.folder, str(error), advice if error.is_killed else _ANOTHER) from error
