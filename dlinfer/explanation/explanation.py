"""``dlinfer.explain`` returns an object that tells how dlinfer compiled a model, and renders as text, JSON or HTML.

An Explanation collects the reports of compilations (``dlinfer.graph.report``). ``explain`` compiles only the graphs
that a call of the model itself would compile.
"""

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

import dlinfer
from dlinfer.errors import ExplanationError
from dlinfer.explanation.fields import SCHEMA, Facts, GraphBreak
from dlinfer.explanation.html import page_of
from dlinfer.explanation.text import summary_of, text_of
from dlinfer.graph.cache import disk
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.report import report
from dlinfer.graph.report.report import GraphReport
from dlinfer.graph.torch_private import dynamo

FORMATS = (".txt", ".json", ".html")


@dataclass
class Explanation(Facts):
    """The reports of some compilations. ``str()`` returns a summary, ``to_text()`` everything."""

    _compiled: "_Compiled | None" = field(default=None, repr=False, compare=False)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model once more under no_grad, add the reports of new compilations, and return the call's result.

        Raises ExplanationError if the explanation has no model: it came from ``from_json`` or ``of_process``.
        """
        if self._compiled is None:
            raise ExplanationError(detail="it was loaded from reports and has no model to run")
        return self._compiled.run(self, args, kwargs)

    @classmethod
    def from_json(cls, text: str) -> "Explanation":
        """Return the explanation that ``to_json`` wrote as ``text``. Raises ExplanationError for any other text."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise ExplanationError(detail=f"the JSON has schema {data['schema']}, not {SCHEMA}")
            return cls(
                data["model"],
                [GraphReport.from_dict(graph) for graph in data["graphs"]],
                [GraphBreak(**broken) for broken in data["graph_breaks"]],
                data["seconds"],
                data["cache"],
                data["versions"],
            )
        except (ValueError, KeyError, TypeError) as cause:
            detail = f"the JSON does not hold an explanation: {type(cause).__name__}: {cause}"
            raise ExplanationError(detail=detail) from cause

    def to_json(self) -> str:
        """Return the explanation as one JSON object."""
        return json.dumps(self.to_dict(), indent=1)

    def to_text(self) -> str:
        """Return everything that the explanation holds, as text for people."""
        return text_of(self)

    def to_html(self) -> str:
        """Return one self-contained HTML page, with an outline of what runs."""
        return page_of(self)

    def save(self, path: str | Path) -> Path:
        """Write the explanation to ``path``, in the format that its suffix names.

        Raises ExplanationError for other suffixes.
        """
        target = Path(path)
        forms = dict(zip(FORMATS, (self.to_text, self.to_json, self.to_html), strict=True))
        if target.suffix not in forms:
            raise ExplanationError(detail=f"{target.name!r} does not end in one of {', '.join(FORMATS)}")
        target.write_text(forms[target.suffix](), encoding="utf-8")
        return target

    def __str__(self) -> str:
        return summary_of(self)


def explain(
    model_or_function: Callable[..., Any],
    /,
    *args: Any,
    options: Mapping[str, Any] | CompileOptions | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile a module or function for dlinfer, call it once with these arguments, and explain the compilation.

    options, dynamic: as in ``torch.compile(backend="dlinfer", options=..., dynamic=...)``.

    The model really runs, under no_grad, and what it writes, for example to a KV cache, stays written. Earlier
    compilations of the same model are neither used nor replaced. But if ``dynamic`` is None, Dynamo makes those sizes
    dynamic that changed between earlier calls.

    Raises CompileOptionError, EngineUnavailableError, GraphFallbackError under the fallback policy ``error``, and the
    errors of the model itself.
    """
    compiled = _Compiled(model_or_function, CompileOptions.of(options), dynamic)
    explanation = Explanation(name_of(model_or_function), versions=versions(), _compiled=compiled)
    explanation.run(*args, **kwargs)
    return explanation


def of_process() -> Explanation:
    """Return an explanation of everything that this process compiled so far, for example for LMDeploy."""
    graphs = report.reports()
    seconds = sum(sum(graph.seconds.values()) for graph in graphs)
    breaks = _breaks(dynamo.graph_breaks())
    return Explanation("this process", graphs, breaks, seconds, disk.counts(), versions())


def name_of(model_or_function: Any) -> str:
    """Return "PYTHON_MODULE.NAME": the name of a function, or of the class of a torch module."""
    owner = type(model_or_function) if isinstance(model_or_function, torch.nn.Module) else model_or_function
    name = getattr(owner, "__qualname__", type(owner).__qualname__)
    return f"{getattr(owner, '__module__', '')}.{name}".lstrip(".")


def versions() -> dict[str, str]:
    return {
        "dlinfer": dlinfer.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


class _Compiled:
    """A function under torch.compile, whose backend collects the reports of the function's graphs."""

    def __init__(self, function: Callable[..., Any], options: CompileOptions, dynamic: bool | None) -> None:
        self.options = options
        self.graphs: list[GraphReport] = []
        self.function = dynamo.compile_apart(function, self.compile, dynamic)

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        from dlinfer.graph.backend import dlinfer_backend

        before = report.reports()[-1:]
        run = dlinfer_backend(graph_module, example_inputs, options=self.options)
        # Select new reports by index: old ones are dropped, so positions shift. Dynamo compiles one graph at a time.
        self.graphs += [new for new in report.reports() if not before or new.index > before[0].index]
        return run

    def run(self, explanation: Explanation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        breaks, entries = dynamo.graph_breaks(), disk.counts()
        start = time.perf_counter()
        try:
            with torch.no_grad():
                return self.function(*args, **kwargs)
        finally:
            explanation.seconds += time.perf_counter() - start
            explanation.graphs += self.graphs
            self.graphs = []
            new = _breaks(dynamo.graph_breaks()[len(breaks) :])
            explanation.graph_breaks = _joined([*explanation.graph_breaks, *new])
            for kind, count in disk.counts().items():
                if count > entries.get(kind, 0):
                    more = count - entries.get(kind, 0)
                    explanation.cache[kind] = explanation.cache.get(kind, 0) + more


# Dynamo's text for the commonest break starts with the name of an internal function: replace the text.
_REASONS = {"generic_jump": "a branch that depends on the values of a tensor"}


def _breaks(dynamos: Sequence[tuple[str, str]]) -> list[GraphBreak]:
    breaks: list[GraphBreak] = []
    for text, line in dynamos:
        first, _, rest = text.strip().partition("\n")
        reason = _REASONS.get(first.partition(" ")[0], first)
        advice = [
            item.strip() for item in rest.splitlines() if item.strip().startswith(("Explanation:", "Hint:"))
        ]
        breaks.append(GraphBreak(reason, " ".join(advice), line, 1))
    return _joined(breaks)


def _joined(breaks: Sequence[GraphBreak]) -> list[GraphBreak]:
    """Merge breaks that are equal in everything but their count. The counts are added."""
    counts: dict[tuple[str, str, str], int] = {}
    for item in breaks:
        key = (item.reason, item.advice, item.line)
        counts[key] = counts.get(key, 0) + item.count
    return [GraphBreak(*key, count) for key, count in counts.items()]
