"""Differences from eager that torch's own compilers have by design, and so every backend of theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fuzz import execute, memory
from tests.fuzz.compare import Difference
from tests.fuzz.execute import CallTrace
from tests.fuzz.program import Program, Step
from tests.fuzz.shrink import without


def common(program: Program, difference: Difference, given: Sequence[CallTrace]) -> bool:
    """Whether a difference is one that a compiler of torch's may make."""
    if difference.kind == "stride" and program.door != "loaded":
        index = int(difference.what.rpartition(" ")[2])
        got = given[difference.call].strides[index]
        return any(
            fake_strides(program, difference.call, index, compiled_at) == got
            for compiled_at in range(difference.call + 1)
        )
    if difference.kind == "no error" and difference.what == "NotImplementedError":
        return (
            "not implemented for" in difference.detail
        )  # a compiled loop takes dtypes that torch's kernel lacks
    return difference.kind == "no error" and unused_step_raises(program)


def fake_strides(program: Program, number: int, index: int, compiled_at: int = 0) -> tuple[int, ...] | None:
    """The strides of a result by the fake functions of its ops, which compilers follow; None where one has none.

    The fakes of a few of torch's ops give others than their kernels do. Those of attention depend on the backends that
    are allowed: ``compiled_at`` is the call whose backends count.
    """
    allowed = replace(program.calls[compiled_at], vendor="")
    model, _ = execute.module(program)
    tensors = memory.make(program, number, ("argument",))[1]
    tensors |= {one.name: getattr(model, one.name).data for one in program.of_role(*execute.KEPT)}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), execute.circumstances(allowed):
        values: dict[str, Any] = {name: mode.from_tensor(one) for name, one in tensors.items()}
        for step in program.steps:
            try:
                made = execute.run_step(step, values, execute.namespace())
            except Exception:  # noqa: BLE001 - what has no fake, and what is made of it, is judged by eager
                continue
            if step.makes:
                values[step.makes] = made
    found = values.get(program.returns[index])
    return None if found is None else found.stride()


def unused_step_raises(program: Program) -> bool:
    """Whether the step that raises computes what nothing reads, or writes into it: compilers leave it out."""
    raising: list[Step] = []
    inputs = {one.name for one in program.inputs}

    def watched(step: Step, values: Mapping[str, Any], names: dict[str, Any], widen: bool) -> Any:
        try:
            return execute.run_step(step, values, names, widen)
        except Exception:
            target = values[step.uses[0]]
            shared = any(execute.overlap(target, values[name]) for name in inputs if name in values)
            if step.makes or not shared:
                raising.append(step)
            raise

    model, kept = execute.module(program)
    execute.calls(program, execute.interpreted(program, model, make=watched), kept, watch=False)
    if not raising:
        return False
    made = raising[0].makes or raising[0].uses[0]
    smaller = without(program, [index for index, step in enumerate(program.steps) if step.makes == made])
    gone = {step.makes for step in program.steps} - {step.makes for step in smaller.steps}
    lost = [step for step in program.steps if step not in smaller.steps]
    return smaller.returns == program.returns and all(
        "write" not in step.features or step.uses[0] in gone for step in lost
    )
