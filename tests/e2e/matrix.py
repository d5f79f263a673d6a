"""The matrix: which model meets which engine options, and what has to hold in every cell.

A cell is one engine start. All cells get the same requests (a batch, a stream, staggered arrivals, cancelled
sessions, stop words) and the same oracle, transformers in another process. Families that differ in what they make of
positions have prompts on both sides of their original length and window, and requests in which these meet.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlinfer.vendor import discovery
from examples.tiny_models.families import FAMILIES, POSITIONAL
from tests.e2e.harness import NEW_TOKENS, PROMPT_LENGTHS, EngineRun, Lab

SEEDS = (0, 1, 2)

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "block16": {"block_size": 16},
    "block32": {"block_size": 32},
    "block128": {"block_size": 128},
    "chunked": {"max_prefill_token_num": 32},
    "prefix": {"enable_prefix_caching": True, "block_size": 16},
    "chunked-prefix": {"max_prefill_token_num": 32, "enable_prefix_caching": True, "block_size": 16},
}

# LMDeploy's default, and ``eager_mode=True``.
MODES = ("graph", "eager")

# Graph engines besides the cpu vendor's own; their cells run where a vendor of the name is registered.
ENGINES = ("openvino",)

# What a cell of such an engine runs under: nothing may fall back to single kernels in silence.
STRICT = {"DLINFER_FALLBACK": "error", "DLINFER_SMALL_REGIONS": "engine"}

# Prompts of the families in POSITIONAL: before and behind the original length of 64 tokens and the window of 16. The
# second outgrows the length while it is continued.
POSITION_LENGTHS = (3, 60, 70, 200, 600)
POSITION_CONFIGS = ("base", "chunked", "prefix")
# Whose two best scores are never close on these prompts, see FP32_DECISIVE.
POSITION_SEEDS = {"llama_dynamic": 0, "internlm3": 2}
POSITION_SEED = 3

# The family that meets every configuration in the quick lane.
THOROUGH = "qwen2"

# Prompts that are scored together with HF's continuation of them.
SCORED = [1, 3]

# Prompts whose sessions are aborted after some tokens, and how many they ask for: so many that on a busy machine too
# the abort comes first. Nobody waits for them, so they are as many as a session of these models may hold.
CANCELLED = (0, 3)
CANCELLED_TOKENS = 1900
SESSION_LEN = 2048

# Where HF's two best scores are closer than this, the order of a sum may decide between them. In float32 such
# a pair would make "equal" a matter of luck, so the models' seeds must not produce one; measured errors are
# 5e-6.
FP32_DECISIVE = 1e-4
# The tiny models' logits stay below 8, where neighbouring bfloat16 numbers are 2**-5 apart: each of the two best may
# be rounded one such step towards the other.
BF16_TIE = 2 * 2.0**-5
# Largest difference of teacher-forced logits of magnitude < 8. float32: sums of at most 128 terms in another order.
# bfloat16: four steps of 2**-5, since hidden states are rounded to 8 bits a dozen times on the way.
LOGIT_TOLERANCE = {"float32": 2e-4, "bfloat16": 4 * 2.0**-5}
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Cell:
    family: str
    seed: int
    dtype: str
    config: str
    mode: str = "graph"
    engine: str = ""

    @property
    def name(self) -> str:
        engine = f"-{self.engine}" if self.engine else ""
        return f"{self.family}-s{self.seed}-{self.dtype}-{self.config}-{self.mode}{engine}"

    @property
    def column(self) -> str:
        """Where the table of results has it."""
        return self.engine or (self.config if self.dtype == "float32" else "bf16")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the engine's process."""
        return {"DLINFER_ENGINE": self.engine, **STRICT} if self.engine else {}

    @property
    def missing(self) -> str:
        """Why the cell cannot run here; empty where it can."""
        there = not self.engine or self.engine in discovery.names()
        return "" if there else f"no vendor is registered for the engine {self.engine}"

    @property
    def is_quick(self) -> bool:
        """Part of ``make test``: each family once in either mode, one family in every configuration and dtype.

        Of engines besides the cpu vendor's own, that one family without further options. Families of positions are
        in ``test_positions.py``, where all of them share a process.
        """
        if self.family in POSITIONAL:
            return False
        if self.engine:
            return (self.seed, self.family, self.config, self.mode) == (0, THOROUGH, "base", "graph")
        if self.mode == "eager" and self.config not in ("base", "chunked-prefix"):
            return False
        return self.seed == 0 and (
            self.family == THOROUGH or (self.config == "base" and self.dtype == "float32")
        )


def cells() -> list[Cell]:
    """Every cell: all in float32, and the dense families in bfloat16 without further options.

    Of engines besides the cpu vendor's own each family in float32, and one with other blocks and with longer prompts
    than one prefill takes; their vendors' kernels once more in eager mode.
    """
    fp32 = [Cell(f, s, "float32", c, m) for m in MODES for f in FAMILIES for s in SEEDS for c in CONFIGS]
    dense = [family for family, spec in FAMILIES.items() if spec.dense]
    bf16 = [Cell(f, s, "bfloat16", "base", m) for m in MODES for f in dense for s in SEEDS]
    own = [Cell(f, s, "float32", "base", engine=e) for e in ENGINES for f in FAMILIES for s in SEEDS]
    thorough = [Cell(THOROUGH, 0, "float32", c, engine=e) for e in ENGINES for c in ("block128", "chunked")]
    eager = [Cell(THOROUGH, 0, "float32", "base", "eager", e) for e in ENGINES]
    return fp32 + bf16 + own + thorough + eager + positional_cells()


def positional_cells() -> list[Cell]:
    """Families of positions in float32: alone, with prompts in chunks, and with blocks that texts share."""
    return [
        Cell(family, POSITION_SEEDS.get(family, POSITION_SEED), "float32", config, mode)
        for mode in MODES
        for family in POSITIONAL
        for config in POSITION_CONFIGS
    ]


def check_positions(lab: Lab, cell: Cell) -> list[str]:
    """Run a cell of a family of positions; the failures as text, empty when all is well."""
    model, job = positional_job(lab, cell)
    run = lab.engine(model, positional_steps(job), **positional_options(cell))
    return compare_positions(run, cell, lab.reference(model, **job))


def positional_job(lab: Lab, cell: Cell) -> tuple[Path, dict[str, Any]]:
    """(model, what HF is asked) of a cell of a family of positions."""
    model = lab.model(cell.family, cell.seed, cell.dtype)
    return model, {"prompts": lab.prompts(model, POSITION_LENGTHS), "max_new_tokens": NEW_TOKENS}


def positional_steps(job: dict[str, Any]) -> list[dict]:
    """All prompts at once, one after another, and each among others."""
    many = {
        "prompts": job["prompts"],
        "gen": {"max_new_tokens": job["max_new_tokens"], "ignore_eos": True},
    }
    return [
        {"name": "batch", "kind": "call", **many},
        {"name": "one by one", "kind": "one_by_one", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
    ]


def positional_options(cell: Cell) -> dict[str, Any]:
    """Engine options of a cell of a family of positions."""
    return {"session_len": SESSION_LEN, "eager_mode": cell.mode == "eager", **CONFIGS[cell.config]}


def compare_positions(
    run: EngineRun,
    cell: Cell,
    hf: dict[str, np.ndarray],
    steps: tuple[str, ...] = ("batch", "one by one", "staggered"),
) -> list[str]:
    """Tokens of some steps against HF's, and the graphs that ran."""
    failures = check_decisive(hf) + check_graphs(run, cell)
    for step in steps:
        failures += compare_tokens(step, run, hf, cell.dtype)
    return failures


def check(lab: Lab, cell: Cell) -> list[str]:
    """Run a cell; the failures as text, empty when all is well."""
    if cell.family in POSITIONAL:
        return check_positions(lab, cell)
    model = lab.model(cell.family, cell.seed, cell.dtype)
    prompts = lab.prompts(model)
    prefix_caching = "prefix" in cell.config
    scores_logits = not prefix_caching and cell.config != "chunked"  # chunked: see test_scoring.py
    hf = lab.reference(
        model, prompts=prompts, max_new_tokens=NEW_TOKENS, natural=True, score_continued=SCORED
    )
    scored = [[*hf[f"prompt_{i}"].tolist(), *hf[f"tokens_{i}"].tolist()] for i in SCORED]

    many = {"prompts": prompts, "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}
    lengths = [CANCELLED_TOKENS if i in CANCELLED else NEW_TOKENS for i in range(len(prompts))]
    cancelled = [{"max_new_tokens": length, "ignore_eos": True} for length in lengths]
    stops = stop_requests(lab, model, hf)
    steps = [
        {"name": "batch", "kind": "call", **many},
        {"name": "stream", "kind": "stream", **many},
        {"name": "staggered", "kind": "staggered", "after": 5, **many},
        {
            "name": "cancel",
            "kind": "cancel",
            "after": 12,
            "cancel": list(CANCELLED),
            **many,
            "gen": cancelled,
        },
        {"name": "after cancel", "kind": "call", **many},
        {
            "name": "stop",
            "kind": "call",
            "prompts": [prompts[s.prompt] for s in stops],
            "gen": [s.gen for s in stops],
        },
    ]
    if not prefix_caching:  # LMDeploy refuses to score with prefix caching
        steps.append({"name": "perplexity", "kind": "perplexity", "sequences": scored})
    if scores_logits:  # last: see test_scoring.py for what it does to the next request
        steps.append({"name": "logits", "kind": "teacher_forced", "sequences": scored})
    run = lab.engine(
        model,
        steps,
        environment=cell.environment,
        session_len=SESSION_LEN,
        eager_mode=cell.mode == "eager",
        **CONFIGS[cell.config],
    )

    failures = check_decisive(hf) if cell.dtype == "float32" else []
    failures += check_graphs(run, cell)
    for step in ("batch", "stream", "staggered", "after cancel"):
        failures += compare_tokens(step, run, hf, cell.dtype)
    failures += check_cancelled(run, hf, cell.dtype)
    if cell.dtype == "float32":  # a tie before the stop token would move it
        failures += check_stops(run, hf, stops)
    if prefix_caching:
        failures += check_prefix_hits(run)
    else:
        failures += check_losses(run, hf, cell.dtype)
    if scores_logits:
        failures += check_logits("logits", run, [hf[f"logits_{i}"] for i in range(len(SCORED))], cell.dtype)
    return failures


def check_graphs(run: EngineRun, cell: Cell) -> list[str]:
    """In graph mode prefill, decoding and logits are one graph each, and requests compile nothing.

    An engine whose attention is one for both phases has one graph for them, all of it in the engine.
    """
    graphs = run["graphs"]
    if cell.mode == "eager":
        return [f"eager mode compiled {graphs}"] if graphs["phases"] else []
    failures = []
    expected = ["forward", "logits"] if cell.engine else ["decoding", "logits", "prefill"]
    if sorted(phase for phase, _, _ in graphs["phases"]) != expected:
        failures.append(f"phases: {graphs['phases']}")
    if any(outcome == "eager" for _, outcome, _ in graphs["phases"]):
        failures.append(f"a phase runs eagerly: {graphs['phases']}")
    if graphs["late"] != 0:
        failures.append(f"{graphs['late']} compilations while requests ran")
    for graph in run["explained"] if cell.engine else ():
        if graph["regions"] != 1 or graph["eager"] or graph["engine"] != cell.engine:
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


@dataclass(frozen=True)
class Stop:
    """A request that must end right before position ``at`` of HF's natural continuation."""

    prompt: int
    gen: dict[str, Any]
    at: int
    word: str = ""


def stop_requests(lab: Lab, model: Path, hf: dict[str, np.ndarray]) -> list[Stop]:
    """One stop by token id for the longest prompt, one by word where HF says a word that is one token."""
    natural = hf["natural_3"].tolist()
    at = natural.index(natural[min(7, len(natural) - 1)])
    stops = [Stop(3, {"max_new_tokens": NEW_TOKENS, "stop_token_ids": [natural[at]]}, at)]
    tokenizer = lab.tokenizer(model)
    vocabulary = sorted(tokenizer.get_vocab().items())
    for prompt in range(4):
        tokens = hf[f"natural_{prompt}"].tolist()
        for token in tokens[3:]:
            word = (tokenizer.id_to_token(token) or "").removeprefix("Ġ")
            matching = [i for text, i in vocabulary if word and word in text]
            # LMDeploy's rule (HuggingFaceTokenizer.indexes_containing_token): the word is one token, and then
            # every token that contains it ends the text, if there are at most 5.
            if word.isalpha() and len(tokenizer.encode(word).ids) == 1 and len(matching) <= 5:
                at = next(i for i, t in enumerate(tokens) if t in matching)
                gen = {"max_new_tokens": NEW_TOKENS, "stop_words": [word]}
                return [*stops, Stop(prompt, gen, at, word)]
    raise AssertionError(f"no word in HF's continuations could be a stop word: {model}")


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


def check_logits(step: str, run: EngineRun, expected: list[np.ndarray], dtype: str) -> list[str]:
    failures = []
    for i, shape in enumerate(run[step]):
        if shape != list(expected[i].shape):
            failures.append(f"{step} {i}: shape {shape} instead of {list(expected[i].shape)}")
            continue
        distances = np.abs(run.logits[f"{step}/{i}"] - expected[i]).max(axis=-1)
        wrong = np.flatnonzero(~(distances <= LOGIT_TOLERANCE[dtype])).tolist()
        if wrong:
            failures.append(
                f"{step} {i} differ from HF's at positions {wrong} by up to {distances.max():.2e}"
            )
    return failures
