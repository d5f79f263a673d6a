"""What has to hold in a cell: LMDeploy's answers against transformers', and the graphs that ran."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from examples.tiny_models.vision_families import VISION
from tests.e2e.cell_jobs import (
    CANCELLED,
    CANCELLED_TOKENS,
    SCORED,
    Stop,
    caches_prefixes,
    scored_sequences,
    scores_logits,
    stop_requests,
)
from tests.e2e.harness import NEW_TOKENS, PROMPT_LENGTHS, EngineRun, Lab
from tests.e2e.matrix import BRIEF, Cell

# Where HF's two best scores are closer than this, the order of a sum may decide between them. In float32 such
# a pair would make "equal" a matter of luck, so the models' seeds must not produce one; measured errors are
# 5e-6.
FP32_DECISIVE = 1e-4
# The tiny models' logits stay below 8, where neighbouring bfloat16 numbers are 2**-5 apart: each of the two best may
# be rounded one such step towards the other.
BF16_TIE = 2 * 2.0**-5
# Largest difference of teacher-forced logits of magnitude < 8. float32: sums of at most 128 terms in another order.
# bfloat16: four steps of 2**-5, since hidden states are rounded to 8 bits a dozen times on the way. Where those
# roundings lead is the CPU's: HF's own logits are up to 0.47 from the exact ones, and with AVX2 alone ours are 0.16
# from HF's. So a position farther from HF's has to be nearer the exact logits than HF is.
LOGIT_TOLERANCE = {"float32": 2e-4, "bfloat16": 4 * 2.0**-5}
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


def check(
    lab: Lab, cell: Cell, run: EngineRun, hf: dict[str, np.ndarray], only: tuple[str, ...] = ()
) -> list[str]:
    """The failures as text, empty when all is well. only: the steps of a brief cell that were asked for."""
    failures = check_decisive(hf) if cell.dtype == "float32" else []
    failures += check_graphs(run, cell)
    if cell.family in BRIEF:
        for step in only or ("batch", "one by one", "staggered"):
            failures += compare_tokens(step, run, hf, cell.dtype)
        return failures
    for step in ("batch", "stream", "staggered", "after cancel"):
        failures += compare_tokens(step, run, hf, cell.dtype)
    failures += check_cancelled(run, hf, cell.dtype)
    if cell.dtype == "float32":  # a tie before the stop token would move it
        model = lab.model(cell.family, cell.seed, cell.dtype)
        failures += check_stops(run, hf, stop_requests(lab, model, hf))
    failures += check_prefix_hits(run) if caches_prefixes(cell) else check_losses(run, hf, cell.dtype)
    if scores_logits(cell):
        expected = [hf[f"logits_{i}"] for i in range(len(SCORED))]
        model = lab.model(cell.family, cell.seed, cell.dtype)
        failures += check_logits(
            "logits", run, expected, cell.dtype, lambda: exact_logits(lab, model, scored_sequences(hf))
        )
    return failures


def exact_logits(lab: Lab, model: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """HF's in float32 with a bfloat16 checkpoint's weights, whose errors are a thousandth of bfloat16's."""
    hf = lab.reference(model, dtype="float32", score=sequences)
    return [hf[f"logits_{i}"] for i in range(len(sequences))]


def check_graphs(run: EngineRun, cell: Cell) -> list[str]:
    """In graph mode prefill, decoding, logits and a vision part are one graph each, and requests compile nothing.

    An engine whose attention is one for both phases has one graph for them, all of it in the engine.
    """
    graphs = run["graphs"]
    if cell.mode == "eager":
        return [f"eager mode compiled {graphs}"] if graphs["phases"] else []
    failures = []
    expected = ["forward", "logits"] if cell.engine else ["decoding", "logits", "prefill"]
    expected += ["vision"] if cell.family in VISION else []
    if sorted(phase for phase, _, _ in graphs["phases"]) != expected:
        failures.append(f"phases: {graphs['phases']}")
    if any(outcome == "eager" for _, outcome, _ in graphs["phases"]):
        failures.append(f"a phase runs eagerly: {graphs['phases']}")
    if graphs["late"] != 0:
        failures.append(f"{graphs['late']} compilations while requests ran")
    for graph in run["explained"] if cell.is_strict else ():
        inside = graph["regions"] == 1 and not graph["eager"] and graph["coverage"] == 1.0
        if not inside or graph["engine"] != (cell.engine or "inductor"):
            failures.append(f"not all of it is in the engine: {graph}")
    return failures


def check_decisive(hf: dict[str, np.ndarray]) -> list[str]:
    gap = min(float(hf[name].min()) for name in hf if name.startswith("gap_"))
    if gap >= FP32_DECISIVE:
        return []
    return [f"HF's two best scores come within {gap:.1e}: choose another seed for the prompts"]


def first_difference(tokens: list[int], expected: np.ndarray) -> int | None:
    """Index of the first differing token, also where one is a prefix of the other; None when equal."""
    if tokens == expected.tolist():
        return None
    pairs = zip(tokens, expected.tolist(), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(expected)))


def compare_tokens(step: str, run: EngineRun, hf: dict[str, np.ndarray], dtype: str, rows=None) -> list[str]:
    """All tokens of all (or some) rows against HF's; in bfloat16 a near-tie of HF's own may go either way."""
    failures = []
    for i, response in enumerate(run[step]):
        if rows is not None and i not in rows:
            continue
        expected, gaps, length = hf[f"tokens_{i}"], hf[f"gap_{i}"], len(hf[f"prompt_{i}"])
        if response["input_token_len"] != length:
            failures.append(
                f"{step}: prompt {i} became {response['input_token_len']} tokens instead of {length}"
            )
        tokens = response["token_ids"]
        at = first_difference(tokens, expected)
        if at is None or (dtype == "bfloat16" and len(tokens) == len(expected) and gaps[at] <= BF16_TIE):
            continue
        failures.append(
            f"{step}: prompt {i} ({length} tokens) differs at {at}: {tokens[at : at + 3]} instead of"
            f" {expected[at : at + 3].tolist()} (HF's gap {gaps[min(at, len(gaps) - 1)]:.4f}),"
            f" {response['finish_reason']} {response['error_message'] or ''}"
        )
    return failures


def check_cancelled(run: EngineRun, hf: dict[str, np.ndarray], dtype: str) -> list[str]:
    """Some sessions end early with the tokens they had; the others do not notice."""
    others = tuple(i for i in range(len(PROMPT_LENGTHS)) if i not in CANCELLED)
    failures = compare_tokens("cancel", run, hf, dtype, rows=others)
    for i in CANCELLED:
        response = run["cancel"][i]
        tokens = response["token_ids"]
        if response["finish_reason"] != "abort" or not 12 <= len(tokens) < CANCELLED_TOKENS:
            failures.append(
                f"cancel: session {i} ended with {response['finish_reason']}, {len(tokens)} tokens"
            )
        known = min(len(tokens), NEW_TOKENS)
        if dtype == "float32" and tokens[:known] != hf[f"tokens_{i}"][:known].tolist():
            failures.append(f"cancel: session {i} had other tokens before it was aborted")
    return failures


def check_stops(run: EngineRun, hf: dict[str, np.ndarray], stops: list[Stop]) -> list[str]:
    failures = []
    for stop, response in zip(stops, run["stop"], strict=True):
        expected = hf[f"natural_{stop.prompt}"][: stop.at].tolist()
        if response["token_ids"] != expected or response["finish_reason"] != "stop":
            failures.append(
                f"{stop}: {response['token_ids']}, {response['finish_reason']}; expected {expected}, stop"
            )
        if stop.word and stop.word in response["text"]:
            failures.append(f"{stop}: the text still holds the stop word: {response['text']!r}")
    return failures


def check_prefix_hits(run: EngineRun) -> list[str]:
    """The second time, the 80-token prompt's full blocks come from the cache, save the one with its end."""
    first, again = run["batch"][3]["cached_tokens"], run["stream"][3]["cached_tokens"]
    return (
        [] if first == 0 and again == 64 else [f"cached tokens: {first}, then {again}; expected 0, then 64"]
    )


def check_losses(run: EngineRun, hf: dict[str, np.ndarray], dtype: str) -> list[str]:
    failures = []
    for i, loss in enumerate(run["perplexity"]):
        expected = float(hf[f"loss_{i}"])
        if not abs(loss - expected) <= LOSS_TOLERANCE[dtype]:
            failures.append(f"get_ppl of sequence {i}: {loss}, HF says {expected}")
    return failures


def check_logits(
    step: str,
    run: EngineRun,
    expected: list[np.ndarray],
    dtype: str,
    exact: Callable[[], list[np.ndarray]] | None = None,
) -> list[str]:
    """All logits against HF's. exact: asked for where bfloat16 logits are farther from HF's than LOGIT_TOLERANCE."""
    failures = []
    for i, shape in enumerate(run[step]):
        if shape != list(expected[i].shape):
            failures.append(f"{step} {i}: shape {shape} instead of {list(expected[i].shape)}")
            continue
        ours = run.logits[f"{step}/{i}"]
        distances = np.abs(ours - expected[i]).max(axis=-1)
        wrong = ~(distances <= LOGIT_TOLERANCE[dtype])
        if wrong.any() and dtype == "bfloat16" and exact is not None:
            truth = exact()[i]
            wrong &= ~(np.abs(ours - truth).max(axis=-1) <= np.abs(expected[i] - truth).max(axis=-1))
        if wrong.any():
            failures.append(
                f"{step} {i} differ from HF's at positions {np.flatnonzero(wrong).tolist()}"
                f" by up to {distances[wrong].max():.2e}"
            )
    return failures
