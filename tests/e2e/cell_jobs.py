"""What a cell asks of LMDeploy and of transformers, and both answers.

All cells get the same requests (a batch, a stream, staggered arrivals, cancelled sessions, stop words) and the same
oracle, transformers in another process. Families that differ in what they make of positions have prompts on both sides
of their original length and window, and requests in which these meet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.matrix import BRIEF, CONFIGS, POSITION_LENGTHS, Cell

# Prompts that are scored together with HF's continuation of them.
SCORED = [1, 3]

# Prompts whose sessions are aborted after some tokens, and how many they ask for: so many that on a busy machine too
# the abort comes first. Nobody waits for them, so they are as many as a session of these models may hold.
CANCELLED = (0, 3)
CANCELLED_TOKENS = 1900
SESSION_LEN = 2048


@dataclass(frozen=True)
class Stop:
    """A request that must end right before position ``at`` of HF's natural continuation."""

    prompt: int
    gen: dict[str, Any]
    at: int
    word: str = ""


Answers = dict[str, tuple[EngineRun, dict[str, np.ndarray]]]
"""Name of a cell -> (LMDeploy's run, transformers' answer)."""


def answers(lab: Lab, asked: Mapping[Cell, Sequence[str]], timeout: float = 1900) -> Answers:
    """Ask both sides; of LMDeploy the steps that are named for a cell, all where none is.

    Cells of equal environment share a process, one engine after another: a process takes as long to start as an engine
    to answer.
    """
    hf = dict(zip(asked, lab.references([hf_job(lab, cell) for cell in asked]), strict=True))
    environments = {tuple(cell.environment.items()) for cell in asked}
    found: Answers = {}
    for environment in sorted(environments):
        sharing = [cell for cell in asked if tuple(cell.environment.items()) == environment]
        starts = []
        for cell in sharing:
            named = asked[cell]
            chosen = [step for step in steps(lab, cell, hf[cell]) if not named or step["name"] in named]
            starts.append((lab.model(cell.family, cell.seed, cell.dtype), chosen, options(cell)))
        runs = lab.engines(starts, timeout, dict(environment))
        found |= {cell.name: (run, hf[cell]) for cell, run in zip(sharing, runs, strict=True)}
    return found


def options(cell: Cell) -> dict[str, Any]:
    """Of PytorchEngineConfig."""
    return {"session_len": SESSION_LEN, "eager_mode": cell.mode == "eager", **CONFIGS[cell.config]}


def caches_prefixes(cell: Cell) -> bool:
    return "prefix" in cell.config


def scores_logits(cell: Cell) -> bool:
    """LMDeploy refuses to score with prefix caching; for prompts in chunks see test_scoring.py."""
    return not caches_prefixes(cell) and cell.config != "chunked"


def hf_job(lab: Lab, cell: Cell) -> tuple[Path, dict[str, Any]]:
    """(model, what HF is asked)."""
    model = lab.model(cell.family, cell.seed, cell.dtype)
    if cell.family in BRIEF:
        return model, {"prompts": lab.prompts(model, POSITION_LENGTHS), "max_new_tokens": NEW_TOKENS}
    return model, {
        "prompts": lab.prompts(model),
        "max_new_tokens": NEW_TOKENS,
        "natural": True,
        "score_continued": SCORED,
    }


def steps(lab: Lab, cell: Cell, hf: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What LMDeploy is asked."""
    model, job = hf_job(lab, cell)
    many = {"prompts": job["prompts"], "gen": {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}}
    batch = {"name": "batch", "kind": "call", **many}
    staggered = {"name": "staggered", "kind": "staggered", "after": 5, **many}
    if cell.family in BRIEF:
        return [batch, {"name": "one by one", "kind": "one_by_one", **many}, staggered]
    asked = [
        batch,
        {"name": "stream", "kind": "stream", **many},
        staggered,
        {
            "name": "cancel",
            "kind": "cancel",
            "after": 12,
            "cancel": list(CANCELLED),
            **many,
            "gen": [
                {"max_new_tokens": CANCELLED_TOKENS if i in CANCELLED else NEW_TOKENS, "ignore_eos": True}
                for i in range(len(job["prompts"]))
            ],
        },
        {"name": "after cancel", "kind": "call", **many},
    ]
    stops = stop_requests(lab, model, hf)
    asked.append(
        {
            "name": "stop",
            "kind": "call",
            "prompts": [job["prompts"][s.prompt] for s in stops],
            "gen": [s.gen for s in stops],
        }
    )
    scored = scored_sequences(hf)
    if not caches_prefixes(cell):
        asked.append({"name": "perplexity", "kind": "perplexity", "sequences": scored})
    if scores_logits(cell):  # last: see test_scoring.py for what it does to the next request
        asked.append({"name": "logits", "kind": "teacher_forced", "sequences": scored})
    return asked


def scored_sequences(hf: dict[str, np.ndarray]) -> list[list[int]]:
    """The tokens that both sides score: prompts with HF's continuations."""
    return [[*hf[f"prompt_{i}"].tolist(), *hf[f"tokens_{i}"].tolist()] for i in SCORED]


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
