"""What a model loses where its weights are packed: LMDeploy serves it as it is stored and packed, and the logits of a
text are compared.

Nothing is simulated: each number comes from the layers that would serve, with activations rounded where they round
them, by DLINFER_CPU_WEIGHTS. Each way runs in a process of its own, one after the other, as settings are a process's.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import dlinfer
from dlinfer.framework.lmdeploy_ext.checks.folder.model_checks import check_model_folder
from dlinfer.framework.lmdeploy_ext.errors import LossError
from dlinfer.framework.lmdeploy_ext.quantise.tokens import tokens_of
from dlinfer.toolchain import process

SCHEMA = 1
BITS = {"w8a8": "int8", "awq-int4": "int4"}
"""Format -> the value of DLINFER_CPU_WEIGHTS that packs a model as it."""

WINDOW = 256
"""Tokens that are seen at once; each window begins anew."""

_LEAST = 2
_HEADS = ("kept", "int8")
_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Way:
    """One way of packing against the model as it is stored.

    head: value of DLINFER_CPU_HEAD. perplexity: exp of the mean loss of a token. logit_error: norm of the difference of
    the logits over the norm of the logits, each row less its mean, in the root of the mean over all rows.
    worst_logit: the largest difference of one logit. divergence: mean Kullback-Leibler divergence of the next token,
    in nats. same_token: share of rows whose most likely token is the same.
    """

    head: str
    perplexity: float
    logit_error: float
    worst_logit: float
    divergence: float
    same_token: float


@dataclass(frozen=True)
class Loss:
    """The comparison. tokens: that were predicted. perplexity: of the model as it is stored."""

    schema: int
    folder: str
    format: str
    text: str
    tokens: int
    perplexity: float
    ways: list[Way]


def measure(
    folder: Path,
    form: str,
    text: Path | None = None,
    tokens: int = 1024,
    tell: Callable[[str], None] = lambda said: None,
) -> Loss:
    """Compare logits of a model of ``folder`` as it is stored with those of it packed, its projection kept or in int8.

    form: w8a8 or awq-int4. text: a file in UTF-8; None is Python's own help on its language, which every Python has.
    tokens: of the text, at most, 2 or more, in windows of 256. tell: is told what is being done. Raises LossError, and
    what is refused of the folder.
    """
    if form not in BITS:
        raise _failed(folder, f"{form} is not made while a model loads", f"use one of {', '.join(BITS)}")
    if tokens < _LEAST:
        detail = f"tokens is {tokens}, and one is predicted from those before it"
        raise _failed(folder, detail, f"give {_LEAST} or more with --tokens")
    check_model_folder(folder)
    windows = _windows(folder, _text(folder, text), tokens)
    with tempfile.TemporaryDirectory(prefix="dlinfer-loss-") as made:
        work = Path(made)
        tell("the model as it is stored")
        stored = _served(folder, work, windows, "", "kept")
        ways = []
        for head in _HEADS:
            tell(f"the model in {BITS[form]}, its output projection {head}")
            ways.append(Way(head, **_served(folder, work, windows, BITS[form], head)))
    predicted = sum(len(window) - 1 for window in windows)
    source = "pydoc_data.topics" if text is None else str(text)
    return Loss(SCHEMA, str(folder), form, source, predicted, stored["perplexity"], ways)


def _failed(folder: Path, detail: str, advice: str) -> LossError:
    return LossError(path=str(folder), detail=detail, advice=advice)


def _text(folder: Path, text: Path | None) -> str:
    if text is None:
        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _failed(folder, f"the text cannot be read: {error}", "give a file in UTF-8") from error


def _windows(folder: Path, text: str, most: int) -> list[list[int]]:
    first, tokens = tokens_of(folder, text[: 32 * most])
    step, tokens = WINDOW - len(first), tokens[:most]
    windows = [[*first, *tokens[at : at + step]] for at in range(0, len(tokens), step)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise _failed(folder, f"the text has {len(tokens)} tokens", "give a longer text, or more --tokens")
    return windows


def _served(folder: Path, work: Path, windows: list[list[int]], bits: str, head: str) -> dict[str, float]:
    """What ``loss_job`` says of the model as the settings pack it."""
    job = {"folder": str(folder.resolve()), "windows": windows, "is_first": not bits}
    (work / "job.json").write_text(json.dumps(job))
    root = str(Path(dlinfer.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "HF_HUB_OFFLINE": "1",
        "DLINFER_CPU_WEIGHTS": bits,
        "DLINFER_CPU_HEAD": head,
    }
    command = [sys.executable, "-m", "dlinfer.framework.lmdeploy_ext.quantise.loss_job", str(work)]
    try:
        process.run(command, seconds=_SECONDS, folder=work, environment=environment)
    except process.ProcessFailedError as failed:
        last = failed.lines[-1] if failed.lines else "it printed nothing"
        how = f"with DLINFER_CPU_WEIGHTS={bits}" if bits else "as it is stored"
        raise _failed(
            folder, f"serving it {how} failed: {failed}: {last}", "see that it can be served"
        ) from failed
    return json.loads((work / "answer.json").read_text())
