"""Measures the loss from packing weights: compares the logits of a packed model with those of the stored model.

LMDeploy serves both models. DLINFER_CPU_WEIGHTS packs the layers, as in any engine. Each model runs in a separate
process, since settings hold for a whole process. The processes run one after the other.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from dlinfer.framework.lmdeploy_ext.checks.folder.model_folder import check_model_folder
from dlinfer.framework.lmdeploy_ext.errors import LossError
from dlinfer.framework.lmdeploy_ext.quantise import job
from dlinfer.framework.lmdeploy_ext.quantise.tokens import read_text, tokens_of

SCHEMA = 1
BITS = {"w8a8": "int8", "awq-int4": "int4"}
"""Format -> the value of DLINFER_CPU_WEIGHTS that packs weights to this format."""

WINDOW = 256
"""Tokens in a window. Each window is served as a separate prompt."""

_LEAST = 2
_KEPT = "kept"
_HEADS = (_KEPT, "int8")


@dataclass(frozen=True)
class Way:
    """A packed model, compared with the model as it is stored.

    head: the value of DLINFER_CPU_HEAD.
    perplexity: exp of the mean loss of a token.
    logit_error: the norm of the logits' differences, divided by the norm of the stored model's logits. For both norms
        each row's mean is subtracted.
    worst_logit: the largest difference of a logit.
    divergence: the mean Kullback-Leibler divergence of the next-token distributions, in nats.
    same_token: the share of rows with the same most likely token.
    """

    head: str
    perplexity: float
    logit_error: float
    worst_logit: float
    divergence: float
    same_token: float


@dataclass(frozen=True)
class Loss:
    """The comparison of a model's logits with and without packed weights.

    format: the format of the packed weights. text: the file that was read, or ``pydoc_data.topics``.
    tokens: the number of predicted tokens. perplexity: of the model as it is stored.
    ways: the packed models, one for each value of DLINFER_CPU_HEAD.
    """

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
    """Measure how packing changes a model's logits, first with an unpacked and then with an int8 output projection.

    form: w8a8 or awq-int4. text: a UTF-8 file; None takes the help texts of Python's ``pydoc``. tokens: read at most
    this many tokens of the text, 2 or more, in windows of 256. tell: called with lines of progress. Raises LossError if
    the text is unusable or a run fails. Also raises the errors of ``check_model_folder``.
    """
    if form not in BITS:
        detail = f"DLINFER_CPU_WEIGHTS cannot pack weights to {form}"
        raise _failed(folder, detail, f"use one of {', '.join(BITS)}")
    if tokens < _LEAST:
        detail = f"tokens is {tokens}, but a prediction needs a token before it"
        raise _failed(folder, detail, f"use --tokens {_LEAST} or more")
    check_model_folder(folder)
    windows = windows_of(folder, text, tokens)
    with tempfile.TemporaryDirectory(prefix="dlinfer-loss-") as temporary:
        work = Path(temporary)
        tell("running the model as it is stored")
        stored = _served(folder, work, windows, _KEPT, _KEPT)
        ways = []
        for head in _HEADS:
            tell(f"running the model in {BITS[form]}, with DLINFER_CPU_HEAD={head}")
            ways.append(Way(head, **_served(folder, work, windows, BITS[form], head)))
    predicted = sum(len(window) - 1 for window in windows)
    source = "pydoc_data.topics" if text is None else str(text)
    return Loss(SCHEMA, str(folder), form, source, predicted, stored["perplexity"], ways)


def _failed(folder: Path, detail: str, advice: str) -> LossError:
    return LossError(path=str(folder), detail=detail, advice=advice)


def windows_of(folder: Path, text: Path | None, most: int) -> list[list[int]]:
    """Return the windows of tokens that ``measure`` predicts. most: the most tokens of the text to take."""
    pages = [topics[name] for name in sorted(topics)]
    words = "\n".join(pages) if text is None else read_text(text, folder, LossError)
    first, tokens = tokens_of(folder, words[: 32 * most])
    step, tokens = WINDOW - len(first), tokens[:most]
    windows = [[*first, *tokens[at : at + step]] for at in range(0, len(tokens), step)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise _failed(
            folder,
            f"the text has {len(tokens)} tokens, too few to predict one",
            "use a longer text, or more --tokens",
        )
    return windows


def _served(folder: Path, work: Path, windows: list[list[int]], bits: str, head: str) -> dict[str, float]:
    """Serve the model in a process of ``loss_job`` and return its measures.

    work: a temporary folder for the job's files. bits, head: the values of DLINFER_CPU_WEIGHTS and DLINFER_CPU_HEAD.
    """
    request = {"folder": str(folder.resolve()), "windows": windows, "is_first": bits == _KEPT}
    try:
        return job.run("loss_job", work, request, DLINFER_CPU_WEIGHTS=bits, DLINFER_CPU_HEAD=head)
    except job.JobError as error:
        how = "as it is stored" if bits == _KEPT else f"with DLINFER_CPU_WEIGHTS={bits}"
        advice = f"run `dlinfer preflight {folder}`, which checks the model"
        raise _failed(folder, f"serving it {how} failed: {error}", advice) from error
