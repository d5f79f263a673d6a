"""Quantises a model folder into a new folder, tensor by tensor. The new folder appears complete or not at all."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.formats import FORMATS, GROUP_SIZES, AwqInt4, Format, pieces
from dlinfer.framework.lmdeploy_ext.errors import QuantisationOutputError
from dlinfer.framework.lmdeploy_ext.quantise import calibration as calibrations
from dlinfer.framework.lmdeploy_ext.quantise import source as sources
from dlinfer.framework.lmdeploy_ext.quantise import writer
from dlinfer.framework.lmdeploy_ext.quantise.calibration import Calibration, Perplexity
from dlinfer.framework.lmdeploy_ext.quantise.source import Source, unsupported

SCHEMA = 1

PIECE = 1 << 22
"""The number of elements that are quantised at once. Their copies in float64 and int64 take some 200 MiB."""

Progress = Callable[[int, int, str], None]
"""A function that is called with (bytes done so far, bytes of all weights, name of the next tensor)."""

Parts = Callable[[str], dict[str, Tensor]]
"""A function that takes a weight's name and returns its calibrated tensors."""


@dataclass(frozen=True)
class Report:
    """A finished quantisation. All sizes are in bytes.

    format: the format's name.
    group: a text that says which elements share a scale.
    quantised, kept: the numbers of quantised tensors and of copied tensors.
    weights_before, weights_after: the size of the weights to quantise in the input, and their size in the output.
    bytes_before, bytes_after: the size of all tensors in the input and in the output.
    worst_error: the largest relative error of a weight: the norm of the difference divided by the norm of the weight.
    worst_tensor: the name of the weight with this error.
    perplexity: the perplexities on held-out text; None without calibration.
    """

    schema: int
    folder: str
    out: str
    format: str
    group: str
    quantised: int
    kept: int
    weights_before: int
    weights_after: int
    bytes_before: int
    bytes_after: int
    worst_error: float
    worst_tensor: str
    perplexity: Perplexity | None = None


def format_of(name: str, group_size: int | None = None) -> Format:
    """Return the format ``name``. group_size: for awq-int4 only; None means 128.

    Raises UnsupportedFeatureError for an unknown name or an unsupported group size.
    """
    if name == "awq-int4":
        if group_size is not None and group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise unsupported(f"group size {group_size}", f"use one of {sizes}")
        return AwqInt4(group_size or 128)
    if name not in FORMATS:
        raise unsupported(f"the format {name!r}", f"use one of {', '.join(FORMATS)}")
    if group_size is not None:
        raise unsupported(f"a group size for {name}", "leave it out: only awq-int4 has groups")
    return FORMATS[name]()


def quantise(
    folder: Path,
    out: Path,
    form: Format,
    progress: Progress = lambda done, total, name: None,
    calibration: Calibration | None = None,
) -> Report:
    """Quantise the model in ``folder`` into a new folder ``out``, which appears complete or not at all.

    Checks that read no weights run before anything is written. calibration: the data for calibrated rounding; None
    rounds each number to the nearest.

    Raises the errors of ``source.read``. Raises QuantisationSourceError for weights that are not finite or too large
    for the format. Raises QuantisationOutputError if ``out`` exists or cannot be written. Raises CalibrationError if
    the calibration fails.
    """
    _check_out(out)
    if calibration is not None:
        calibrations.check(form, calibration, folder)
    source = sources.read(folder, form)
    layouts = {shard: _layout(source, form, shard) for shard in source.shards}
    _check_room(out, source, layouts, copies=1 if calibration is None else 2)
    beside, calibrated, temporary = out.resolve().parent, nullcontext((None, None)), None
    if calibration is not None:
        calibrated = calibrations.calibrated(
            source, form, calibration, beside, lambda text: progress(0, source.nbytes, text)
        )
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=beside))
        with calibrated as (parts, perplexity):
            worst_error, worst_tensor = _write(source, form, layouts, temporary, progress, parts)
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users
        _check_out(out)  # checked again, since somebody may have made it meanwhile
        temporary.rename(out)
    except QuantisationOutputError:
        raise
    except OSError as error:
        raise _unwritable(out, str(error)) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    after = sum(map(_bytes, layouts.values()))
    kept = source.nbytes - source.quantised_nbytes
    return Report(
        schema=SCHEMA,
        folder=str(folder),
        out=str(out),
        format=form.name,
        group=form.group,
        quantised=len(source.quantised),
        kept=len(source.tensors) - len(source.quantised),
        weights_before=source.quantised_nbytes,
        weights_after=after - kept,
        bytes_before=source.nbytes,
        bytes_after=after,
        worst_error=worst_error,
        worst_tensor=worst_tensor,
        perplexity=perplexity,
    )


# --- before anything is written


def _unwritable(
    out: Path, detail: str, advice: str = "correct the cause, or choose another folder"
) -> QuantisationOutputError:
    return QuantisationOutputError(path=str(out), detail=detail, advice=advice)


def _check_out(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise _unwritable(out, "it already exists", "remove it, or choose another name")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise _unwritable(out, f"there is no folder {parent}", "create it, or choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(out, f"this process may not write to {parent}", "choose another folder")


def _layout(source: Source, form: Format, shard: str) -> writer.Layout:
    """Return the tensors of the file that replaces the weight file ``shard``: name -> (dtype, shape)."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in source.tensors.items():
        if tensor.file == shard and name in source.quantised:
            owner = name.removesuffix("weight")
            layout |= {f"{owner}{part}": planned for part, planned in form.parts(*tensor.shape).items()}
        elif tensor.file == shard:
            layout[name] = tensor.dtype, tensor.shape
    return layout


def _bytes(layout: writer.Layout) -> int:
    return sum(writer.nbytes(*planned) for planned in layout.values())


def _check_room(out: Path, source: Source, layouts: dict[str, writer.Layout], copies: int) -> None:
    weights = sum(len(writer.header(layout)[0]) + _bytes(layout) for layout in layouts.values())
    needed = copies * weights + sum(path.stat().st_size for path in source.files)
    free = shutil.disk_usage(out.resolve().parent).free
    if needed > free:
        detail = f"it takes {needed} bytes, but only {free} are free there"
        raise _unwritable(out, detail, "free space there, or choose a folder on another disk")


# --- writing


def _write(
    source: Source,
    form: Format,
    layouts: dict[str, writer.Layout],
    folder: Path,
    progress: Progress,
    calibrated: Parts | None,
) -> tuple[float, str]:
    """Write all weight files into ``folder``, and return (largest relative error of a weight, name of that weight)."""
    from safetensors import safe_open

    done, worst = 0, (-1.0, "")
    for shard, layout in layouts.items():
        with (
            safe_open(source.folder / shard, framework="pt") as file,
            writer.ShardWriter(folder / shard, layout) as out,
        ):
            for name in sorted(name for name, tensor in source.tensors.items() if tensor.file == shard):
                progress(done, source.nbytes, name)
                tensors, owner = {name: file.get_tensor(name)}, name.removesuffix("weight")
                if name in source.quantised:
                    rounded = calibrated and calibrated(name)
                    parts, error = _quantised(tensors[name], name, source, form, rounded)
                    tensors = {f"{owner}{part}": numbers for part, numbers in parts.items()}
                    worst = max(worst, (error, name))
                for written, numbers in tensors.items():
                    out.write(written, numbers)
                done += source.tensors[name].nbytes
    progress(done, source.nbytes, "")
    if source.sharded:
        weight_map = {name: shard for shard, layout in layouts.items() for name in layout}
        size = {"total_size": sum(map(_bytes, layouts.values()))}
        index = {"metadata": size, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / sources.INDEX, index)
    _write_json(folder / "config.json", sources.written_config(source.config, form))
    for path in source.files:
        shutil.copyfile(path, folder / path.name)
    return worst


def _quantised(
    weight: Tensor, name: str, source: Source, form: Format, calibrated: dict[str, Tensor] | None
) -> tuple[dict[str, Tensor], float]:
    """Return (a weight's quantised tensors, the relative error).

    calibrated: the tensors that the calibration returned for this weight; None rounds to the nearest.
    """
    rounded: list[dict[str, Tensor]] = []
    difference, norm = 0.0, 0.0
    for piece in pieces(weight, PIECE) if calibrated is None else [weight]:
        if not piece.isfinite().all():
            detail = f"{name} contains infinity or NaN"
            raise sources.refusal(source.folder, form, detail, "use a checkpoint with finite weights")
        parts = form.quantise(piece) if calibrated is None else calibrated
        again = form.dequantise(parts)
        if not again.isfinite().all():
            detail = f"{name} has values that are too large for the format's scales"
            raise sources.refusal(source.folder, form, detail, "use w8a8 or fp8")
        difference += float((again.double() - piece.double()).square().sum())
        norm += float(piece.double().square().sum())
        rounded.append(parts)
    joined = {part: torch.cat([parts[part] for parts in rounded], dim=form.joined) for part in rounded[0]}
    return joined, math.sqrt(difference / norm) if norm else 0.0


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
