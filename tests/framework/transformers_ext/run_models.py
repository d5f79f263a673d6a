"""The model matrix of ``optimize`` and of ``attn_implementation="dlinfer"``, eagerly.

``python -m tests.framework.transformers_ext.run_models [--only NAME ...] [--write-docs]``: each architecture of
tests/graph/matrix/models.py as transformers has it, then optimized, then with dlinfer's attention besides, then undone.
Architectures that have a result for exactly this code are not run again. Exit code 0 only if all pass.
"""

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig

from dlinfer.errors import DlinferError
from dlinfer.framework.transformers_ext import Optimization, optimize, register_attention
from tests.graph.matrix import calls
from tests.graph.matrix.ledger import ROOT, STATE, Ledger
from tests.graph.matrix.model_job import Answers, error
from tests.graph.matrix.models import ARCHITECTURES, Architecture, build
from tests.graph.matrix.progress import progress

DOCUMENT = ROOT / "docs" / "results" / "transformers_models.md"
SIZES = ((1, 5), (2, 8))
TOLERANCE = 1e-5
"""Of float32 results relative to the largest number of a tensor: sums of some hundred terms in another order give 1e-6
after these few layers."""
NEW_TOKENS = 8


def answers(architecture: Architecture, model: Any) -> Answers:
    """Every call of the architecture's plan at two sizes."""
    found: Answers = []
    for batch, length in SIZES:
        rng = torch.Generator().manual_seed(0)

        def forward(_: str, **inputs: Any) -> Any:
            return model(**inputs)

        plan = calls.PLANS[architecture.inputs](architecture, model, forward, (batch, length), rng)
        found += [(f"{batch}x{length} {name}", value.clone()) for name, value in plan]
    return found


def tokens(model: Any) -> list[Any]:
    """Greedy tokens of a batch that is padded on the left, with a dynamic and a static cache; why there are none."""
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found: list[Any] = []
    for cache in ("dynamic", "static"):
        given = GenerationConfig(
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=1,
            cache_implementation=cache,
            disable_compile=True,
        )
        try:
            found.append(model.generate(ids, attention_mask=mask, generation_config=given).tolist())
        except DlinferError:
            raise
        except (
            ValueError,
            TypeError,
            AttributeError,
            RuntimeError,
            NotImplementedError,
            IndexError,
        ) as cause:
            found.append(f"{cache}: {type(cause).__name__}")  # of transformers' own, the same of both sides
    return found


def worst(got: Answers, want: Answers) -> float:
    return max(error(mine, theirs) for (_, mine), (_, theirs) in zip(got, want, strict=True))


def swapped(done: Optimization) -> list[str]:
    """Classes and what they run on; how many of which were kept and why."""
    ran = Counter((one.module, ", ".join(one.ops)) for one in done.swapped)
    left = Counter((one.module, one.reason) for one in done.kept)
    lines = [f"{count} {name}: {ops}" for (name, ops), count in ran.items()]
    return lines + [f"{count} {name} kept: {why}" for (name, why), count in left.items()]


def attended(model: Any, ask: Callable[[], Any], back_to: str) -> Any:
    """What a model gives with dlinfer's attention, or why it has none."""
    try:
        model.set_attn_implementation("dlinfer")
        if model.config._attn_implementation != "dlinfer":
            return "transformers has one implementation only"
        return ask()
    except (DlinferError, ValueError) as refused:
        return str(refused).split("\n", 1)[0][:160]
    finally:
        model.set_attn_implementation(back_to)


def job(architecture: Architecture) -> dict[str, Any]:
    """The result of one architecture."""
    model = build(architecture)
    generates = architecture.inputs == "generator"
    stock = model.config._attn_implementation
    result: dict[str, Any] = {"problems": []}
    with torch.no_grad():
        want = answers(architecture, model)
        want_tokens = tokens(model) if generates else None
        done = optimize(model)
        result["swapped"] = swapped(done)
        result["error"] = worst(answers(architecture, model), want)
        same = tokens(model) == want_tokens if generates else None
        result["tokens"] = same

        def ask() -> Any:
            off = worst(answers(architecture, model), want)
            return off, tokens(model) == want_tokens if generates else None

        attention = attended(model, ask, stock)
        done.undo()
        again = answers(architecture, model)
    undone = all(torch.equal(one, other) for (_, one), (_, other) in zip(again, want, strict=True))
    result["attention"] = attention if isinstance(attention, str) else list(attention)
    if not result["error"] < TOLERANCE:
        result["problems"].append(f"optimized: {result['error']:.1e}")
    if same is False:
        result["problems"].append("optimized: other tokens")
    if not undone:
        result["problems"].append("undo() does not give the same bits")
    if not isinstance(attention, str):
        off, attended_same = attention
        if not off < TOLERANCE:
            result["problems"].append(f"attention: {off:.1e}")
        if attended_same is False:
            result["problems"].append("attention: other tokens")
    return result


def lane() -> str:
    """The adaptor's own code, which the ledger's fingerprint leaves out."""
    files = [*sorted((ROOT / "dlinfer" / "framework" / "transformers_ext").glob("*.py")), Path(__file__)]
    return "optimize " + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def row(name: str, kind: str, result: dict[str, Any]) -> str:
    attention, same = result["attention"], {True: "equal", False: "other", None: ""}
    told = attention if isinstance(attention, str) else f"{attention[0]:.1e} {same[attention[1]]}".strip()
    cells = [
        name,
        kind,
        "; ".join(result["problems"]) or "pass",
        f"{result['error']:.1e}",
        same[result["tokens"]],
        told,
        "<br>".join(result["swapped"]) or "the model has no modules to optimize",
    ]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def document(results: dict[str, dict[str, Any]]) -> str:
    rows = [row(one.name, one.kind, results[one.name]) for one in ARCHITECTURES]
    passed = sum(not results[one.name]["problems"] for one in ARCHITECTURES)
    versions = ", ".join(f"{library} {metadata.version(library)}" for library in ("torch", "transformers"))
    table = "\n".join(rows)
    return f"""# Optimized models

For everybody who calls `dlinfer.transformers.optimize`: the ops that run the modules of each model.

Made by `make transformers-models`; do not edit. {passed} of {len(rows)} architectures pass, with {versions}.

Each is transformers' own class with a tiny random configuration in float32. It is called eagerly at two sizes: as it
is, after `dlinfer.transformers.optimize(model)`, then with `attn_implementation="dlinfer"` too. After `undo()` it gives
the same bits as at first. *Error* is the largest difference, relative to the largest number of the tensor compared;
{TOLERANCE} is allowed. *Tokens* are those of `generate`: {NEW_TOKENS} greedy ones of a batch that is padded on the
left, with a dynamic and a static cache where transformers has one. *Attention* has both with dlinfer's attention, or
why there is none.

| architecture | kind | verdict | error | tokens | attention | modules |
| --- | --- | --- | --- | --- | --- | --- |
{table}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=[one.name for one in ARCHITECTURES], metavar="NAME")
    parser.add_argument("--write-docs", action="store_true", help="write docs/results/transformers_models.md")
    options = parser.parse_args()
    register_attention()
    ledger, console = Ledger(STATE / "transformers.jsonl", lane()), Console(stderr=True)
    chosen = [one for one in ARCHITECTURES if not options.only or one.name in options.only]
    done = ledger.entries()
    missing = [one for one in chosen if one.name not in done]
    with progress("models", len(chosen), len(chosen) - len(missing), console) as advance:
        for architecture in missing:
            result = job(architecture)
            ledger.record(architecture.name, result)
            advance([f"{architecture.name}: {'; '.join(result['problems']) or 'pass'}"])
    results = ledger.entries()
    if options.write_docs and all(one.name in results for one in ARCHITECTURES):
        DOCUMENT.write_text(document(results))
    return 1 if any(results[one.name]["problems"] for one in chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
