"""Checks of graph mode: the op under ``torch.compile(backend="dlinfer")``, run by the vendor's default engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dlinfer import settings
from dlinfer.conformance.case import Case, Skipped, Subject


def graph(case: Case) -> None:
    """Check the op compiled with static sizes: call it twice, each time with new arguments."""
    _calls(case, [case, case], dynamic=False)


def dynamic(case: Case, others: list[Case]) -> None:
    """Check the op compiled with symbolic sizes: call one compiled function with ``case`` and then with ``others``."""
    _calls(case, [case, *others, case], dynamic=True)


def _calls(case: Case, calls: list[Case], dynamic: bool) -> None:
    engine = engine_of(case.subject)
    torch.compiler.reset()
    try:
        run = _compiled(case, engine, dynamic)
        for call in calls:
            args = call.fresh()
            returned = run(*args)
            leaves = pytree.tree_leaves(returned)
            case.subject.check_device(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            call.compare(args, returned, call.expected())
    finally:
        torch.compiler.reset()


def engine_of(subject: Subject) -> str:
    """Return the engine of the settings if the vendor has it, else the vendor's default engine.

    Raise Skipped if the vendor has no engines.
    """
    vendor = subject.vendor
    engine = settings.current().engine
    if engine in vendor.engines:
        return engine
    if not vendor.engines:
        raise Skipped("the vendor has no graph engine")
    return vendor.default_engine or vendor.engines[0]


def _compiled(case: Case, engine: str, dynamic: bool) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return case.op.overload(*args)

    options: Any = {"engine": engine, "small_regions": "engine"}
    return torch.compile(call, backend="dlinfer", fullgraph=True, dynamic=dynamic, options=options)
