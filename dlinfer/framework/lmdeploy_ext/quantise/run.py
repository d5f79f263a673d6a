"""One folder quantised into another, tensor by tensor, whole or not at all."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.conversion.formats import (
    FORMATS,
    GROUP_SIZES,
    ROWS,
    AwqInt4,
    Format,
)
from dlinfer.framework.lmdeploy_ext.errors import QuantisationOutputError, QuantisationSourceError
from dlinfer.framework.lmdeploy_ext.quantise import calibration as calibrations
from dlinfer.framework.lmdeploy_ext.quantise import source as sources
from dlinfer.framework.lmdeploy_ext.quantise import writer
from dlinfer.framework.lmdeploy_ext.quantise.calibration import Calibration, Perplexity
from dlinfer.framework.lmdeploy_ext.quantise.source import Source

SCHEMA = 1

PIECE = 1 << 22
"""Numbers that are quantised at once: what is computed of them in float64 and int64 takes some 200 MiB."""

Progress = Callable[[int, int, str], None]
"""Called with the bytes that are done, those of all weights, and the name of the tensor that comes next."""

Parts = Callable[[str], dict[str, Tensor]]
"""Gives the tensors of a weight by its name, where they are not made here."""


@dataclass(frozen=True)
class Report:
    """What was written.

    format, group: the format, and which numbers share a scale. quantised, kept: tensors that were, and those that are
    as they were. weights_before, weights_after: bytes of the quantised tensors. bytes_before, bytes_after: of all.
    worst_error: the largest error of a weight as a whole, the norm of the difference over the norm of the weight.
    worst_tensor: whose it is. perplexity: where it was calibrated, of text that it did not see.
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
    """The format of a name; group_size: of awq-int4, 128 where none is given. Raises UnsupportedFeatureError."""
    if name == "awq-int4":
        if group_size is not None and group_size not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            raise _unsupported(f"group size {group_size}", f"use one of {sizes}")
        return AwqInt4(group_size or 128)
    if name not in FORMATS:
        raise _unsupported(f"the format {name!r}", f"use one of {', '.join(FORMATS)}")
    if group_size is not None:
        raise _unsupported(f"a group size of {name}", "leave it out: only awq-int4 has groups")
    return FORMATS[name]()


def quantise(
    folder: Path,
    out: Path,
    form: Format,
    progress: Progress = lambda done, total, name: None,
    calibration: Calibration | None = None,
) -> Report:
    """Write ``out``, the model of ``folder`` quantised: each number alone, or with a look at ``calibration``.

    Everything that can be known before is checked before anything is written, and ``out`` appears whole or not at all.
    Raises what ``source.read`` raises, QuantisationSourceError also for numbers that are not finite or outgrow the
    format, QuantisationOutputError where ``out`` exists or cannot be written, and CalibrationError.
    """
    _check_out(out)
    if calibration is not None:
        calibrations.check(form, calibration, folder)
    source = sources.read(folder, form)
    layouts = {shard: _layout(source, form, shard) for shard in source.shards}
    _check_room(out, source, layouts, copies=1 if calibration is None else 2)
    perplexity = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.resolve().parent))
    except OSError as error:
        raise _unwritable(out, str(error)) from error
    try:
        if calibration is None:
            worst_error, worst_tensor = _write(source, form, layouts, temporary, progress)
        else:
            total = sum(one.nbytes for one in source.tensors.values())
            beside = out.resolve().parent
            with calibrations.calibrated(
                source, form, calibration, beside, lambda text: progress(0, total, text)
            ) as (parts, perplexity):
                worst_error, worst_tensor = _write(source, form, layouts, temporary, progress, parts)
        temporary.chmod(0o755)  # mkdtemp's 0700 would hide the model from other users
        _check_out(out)  # once more: it took a while
        temporary.rename(out)
    except OSError as error:
        raise error if isinstance(error, QuantisationOutputError) else _unwritable(out, str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _report(source, form, layouts, out, worst_error, worst_tensor, perplexity)


def _unsupported(feature: str, advice: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(feature=feature, where="dlinfer quantise", advice=advice)


# --- before anything is written


def _unwritable(
    out: Path, detail: str, advice: str = "choose another folder, or mend this"
) -> QuantisationOutputError:
    return QuantisationOutputError(path=str(out), detail=detail, advice=advice)


def _check_out(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise _unwritable(out, "it exists", "remove it, or choose another name")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise _unwritable(out, f"there is no folder {parent}", "make it, or choose another name")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise _unwritable(out, f"{parent} may not be written to", "choose another folder")


def _layout(source: Source, form: Format, shard: str) -> writer.Layout:
    """What the file that is written in a shard's place holds."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, one in source.tensors.items():
        if one.file != shard:
            continue
        if name in source.quantised:
            layer = name.removesuffix("weight")
            found |= {f"{layer}{part}": planned for part, planned in form.parts(*one.shape).items()}
        else:
            found[name] = one.dtype, one.shape
    return found


def _bytes(layout: writer.Layout) -> int:
    return sum(math.prod(shape) * writer.BITS[dtype] // 8 for dtype, shape in layout.values())


def _check_room(out: Path, source: Source, layouts: dict[str, writer.Layout], copies: int) -> None:
    weights = sum(len(writer.header(one)[0]) + _bytes(one) for one in layouts.values())
    needed = copies * weights + sum(path.stat().st_size for path in source.files)
    free = shutil.disk_usage(out.resolve().parent).free
    if needed > free:
        detail = f"it takes {needed} bytes, and {free} are free there"
        raise _unwritable(out, detail, "make room there, or choose a folder on another disk")


# --- writing


def _write(
    source: Source,
    form: Format,
    layouts: dict[str, writer.Layout],
    into: Path,
    progress: Progress,
    given: Parts | None = None,
) -> tuple[float, str]:
    """Write all files. Gives the largest error of a weight, and whose it is."""
    from safetensors import safe_open

    total, done = sum(one.nbytes for one in source.tensors.values()), 0
    worst = -1.0, ""
    for shard, layout in layouts.items():
        with (
            safe_open(source.folder / shard, framework="pt") as file,
            writer.ShardWriter(into / shard, layout) as out,
        ):
            for name in sorted(name for name, one in source.tensors.items() if one.file == shard):
                progress(done, total, name)
                tensor = file.get_tensor(name)
                if name in source.quantised:
                    parts, error = _quantised(tensor, name, source, form, given and given(name))
                    layer = name.removesuffix("weight")
                    for part, numbers in parts.items():
                        out.write(f"{layer}{part}", numbers)
                    worst = max(worst, (error, name))
                else:
                    out.write(name, tensor)
                done += source.tensors[name].nbytes
    progress(done, total, "")
    if source.sharded:
        _write_json(into / sources.INDEX, _index(layouts))
    _write_json(into / "config.json", sources.written_config(source.config, form))
    for path in source.files:
        shutil.copyfile(path, into / path.name)
    return worst


def _quantised(
    weight: Tensor, name: str, source: Source, form: Format, given: dict[str, Tensor] | None
) -> tuple[dict[str, Tensor], float]:
    """The tensors of a weight, and its error: norm of the difference over the norm of the weight.

    given: the tensors, where they are not made here.
    """

    def refuse(detail: str, advice: str) -> QuantisationSourceError:
        return QuantisationSourceError(
            path=str(source.folder), form=form.name, detail=f"{name} {detail}", advice=advice
        )

    rows = max(PIECE // weight.shape[1] // ROWS, 1) * ROWS
    if given is not None:
        rows = max(len(weight), 1)
    pieces: list[dict[str, Tensor]] = []
    difference, norm = 0.0, 0.0
    for piece in weight.split(rows):
        if not piece.isfinite().all():
            raise refuse("has numbers that are not finite", "give a checkpoint that is sound")
        parts = form.quantise(piece) if given is None else given
        again = form.dequantise(parts)
        if not again.isfinite().all():
            raise refuse("has numbers too large for the format's scales", "use w8a8 or fp8")
        difference += float((again.double() - piece.double()).square().sum())
        norm += float(piece.double().square().sum())
        pieces.append(parts)
    joined = {part: torch.cat([one[part] for one in pieces], dim=form.joined) for part in pieces[0]}
    return joined, math.sqrt(difference / norm) if norm else 0.0


def _index(layouts: dict[str, writer.Layout]) -> dict[str, object]:
    weight_map = {name: shard for shard, layout in layouts.items() for name in layout}
    total = sum(map(_bytes, layouts.values()))
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _report(
    source: Source,
    form: Format,
    layouts: dict[str, writer.Layout],
    out: Path,
    error: float,
    tensor: str,
    perplexity: Perplexity | None,
) -> Report:
    kept = sum(one.nbytes for name, one in source.tensors.items() if name not in source.quantised)
    before = sum(one.nbytes for one in source.tensors.values())
    after = sum(map(_bytes, layouts.values()))
    return Report(
        schema=SCHEMA,
        folder=str(source.folder),
        out=str(out),
        format=form.name,
        group=form.group,
        quantised=len(source.quantised),
        kept=len(source.tensors) - len(source.quantised),
        weights_before=before - kept,
        weights_after=after - kept,
        bytes_before=before,
        bytes_after=after,
        worst_error=error,
        worst_tensor=tensor,
        perplexity=perplexity,
    )
