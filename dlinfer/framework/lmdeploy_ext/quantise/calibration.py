"""Rounding that looks at data: auto-round chooses each number's neighbour and each group's range by a text.

SignRound: Cheng et al., 2023, arXiv:2309.05516. Of the well-kept libraries it is the one that writes AWQ's layout with
the torch and transformers that LMDeploy 0.18 runs with: llm-compressor 0.14 wants transformers below 5.18 and writes
compressed-tensors. It runs in a process of its own, since it changes classes of transformers', and builds the model.
"""

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import dlinfer
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion.formats import AwqInt4, Format
from dlinfer.framework.lmdeploy_ext.errors import CalibrationError
from dlinfer.framework.lmdeploy_ext.quantise.source import Source
from dlinfer.framework.lmdeploy_ext.quantise.tokens import tokens_of
from dlinfer.toolchain import process

PACKAGE = "auto_round"
_HELD_OUT = 16  # samples at most, and a ninth of all, that are not looked at while rounding
_SECONDS = 7 * 24 * 3600.0
_LEAST = 8  # tokens of a sample


@dataclass(frozen=True)
class Calibration:
    """What to look at. text: a file of text in UTF-8, like what the model will see. samples: at most so many pieces of
    it, of ``length`` tokens each. steps: of the search, for each layer."""

    text: Path
    samples: int = 128
    length: int = 512
    steps: int = 200


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean loss of a token of the text that was held out: of the model in floats, with each number rounded
    to the nearest, and as it was written. samples: how many were looked at."""

    samples: int
    floats: float
    nearest: float
    calibrated: float


def check(form: Format, calibration: Calibration, source: Path) -> None:
    """Raise UnsupportedFeatureError for a format that is not calibrated, and CalibrationError without auto-round."""
    if not isinstance(form, AwqInt4):
        raise UnsupportedFeatureError(
            feature=f"calibrating {form.name}",
            where="dlinfer quantise",
            advice="leave --calibrate out: 8 bits are close to the model in floats without data",
        )
    for name, least in (("samples", 1), ("length", _LEAST), ("steps", 1)):
        if getattr(calibration, name) < least:
            given = getattr(calibration, name)
            raise _failed(source, f"{name} is {given}", f"give {least} or more")
    if importlib.util.find_spec(PACKAGE) is None:
        raise _failed(source, "auto-round is not installed", 'pip install "dlinfer[quantise]"')


@contextmanager
def calibrated(
    source: Source, form: Format, calibration: Calibration, beside: Path, tell: Callable[[str], None]
) -> Iterator[tuple[Callable[[str], dict[str, Tensor]], Perplexity]]:
    """(what gives the tensors of a weight by its name, how good they are), of a folder made for as long as this lasts.

    beside: the folder in which it is made. tell: is told what is being done. Raises CalibrationError, and
    ModelFolderError for a tokenizer that cannot be loaded.
    """
    from safetensors import safe_open

    assert isinstance(form, AwqInt4)  # see ``check``
    samples, held_out = _samples(source, calibration)
    with tempfile.TemporaryDirectory(prefix=".dlinfer-calibration-", dir=beside) as made:
        folder = Path(made)
        torch.save({"samples": samples, "held_out": held_out}, folder / "tokens.pt")
        job = {
            "folder": str(source.folder.resolve()),
            "names": sorted(source.quantised),
            "group_size": form.group_size,
            "steps": calibration.steps,
        }
        (folder / "job.json").write_text(json.dumps(job))
        _run(source, folder, tell)
        answer = json.loads((folder / "answer.json").read_text())
        files: dict[str, Path] = {}
        for path in sorted(Path(answer["written"]).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), path)

        def parts(name: str) -> dict[str, Tensor]:
            layer, found = name.removesuffix("weight"), {}
            for part in form.parts(*source.tensors[name].shape):
                if f"{layer}{part}" not in files:
                    raise _failed(source.folder, f"auto-round wrote no {layer}{part}", _ANOTHER)
                with safe_open(files[f"{layer}{part}"], framework="pt") as file:
                    found[part] = file.get_tensor(f"{layer}{part}")
            return _checked(found, form, source, name)

        yield parts, Perplexity(len(samples), **answer["perplexity"])


_ANOTHER = "install the auto-round that dlinfer[quantise] names, or leave --calibrate out"


def _failed(folder: Path, detail: str, advice: str) -> CalibrationError:
    return CalibrationError(path=str(folder), detail=detail, advice=advice)


def _checked(parts: dict[str, Tensor], form: Format, source: Source, name: str) -> dict[str, Tensor]:
    """The parts, which are those of the format. Raises CalibrationError."""
    dtypes = {torch.int32: "I32", torch.float16: "F16"}
    for part, planned in form.parts(*source.tensors[name].shape).items():
        got = dtypes.get(parts[part].dtype), tuple(parts[part].shape)
        if got != planned:
            raise _failed(source.folder, f"auto-round wrote {part} of {name} as {got}", _ANOTHER)
    return parts


def _samples(source: Source, calibration: Calibration) -> tuple[Tensor, Tensor]:
    """(tokens [samples, length] to look at, tokens [held out, length] to measure on). Raises CalibrationError and
    ModelFolderError."""
    try:
        text = calibration.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _failed(source.folder, f"the text cannot be read: {error}", "give a file in UTF-8") from error
    first, tokens = tokens_of(source.folder, text)
    length, longest = calibration.length, source.config.get("max_position_embeddings") or calibration.length
    if length > longest:
        raise _failed(
            source.folder, f"length is {length}", f"give at most {longest}, the model's longest text"
        )
    step = length - len(first)
    pieces = [[*first, *tokens[at : at + step]] for at in range(0, len(tokens) - step + 1, step)]
    if len(pieces) < 2:
        detail = f"the text has {len(tokens)} tokens, and two samples take {2 * step}"
        raise _failed(source.folder, detail, "give a longer text, or a smaller --length")
    count = min(_HELD_OUT, max(1, len(pieces) // 9))
    return torch.tensor(pieces[:-count][: calibration.samples]), torch.tensor(pieces[-count:])


def _run(source: Source, folder: Path, tell: Callable[[str], None]) -> None:
    layers, done = int(source.config["num_hidden_layers"]), 0

    def told(line: str) -> None:
        nonlocal done
        done += "layers in the block" in line  # auto-round's word for one that is finished
        tell(f"calibrating layer {min(done + 1, layers)} of {layers}")

    root = str(Path(dlinfer.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "dlinfer.framework.lmdeploy_ext.quantise.calibration_job", str(folder)]
    tell("calibrating")
    try:
        process.run(command, seconds=_SECONDS, folder=folder, environment=environment, told=told)
    except process.ProcessFailedError as failed:
        last = failed.lines[-1] if failed.lines else "it printed nothing"
        killed = "by signal 9" in str(failed)
        advice = "give fewer --samples or a smaller --length: it may have run out of memory"
        raise _failed(source.folder, f"{failed}: {last}", advice if killed else _ANOTHER) from failed
