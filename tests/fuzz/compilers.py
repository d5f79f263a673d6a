"""Differences from eager that torch's own compilers have by design, and so every backend of theirs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fuzz import execute, memory
from tests.fuzz.budget import Budget
from tests.fuzz.compare import Difference, differences, same_strides
from tests.fuzz.execute import CallTrace
from tests.fuzz.program import Program, Step
from tests.fuzz.shrink import without


def common(program: Program, difference: Difference, given: Sequence[CallTrace]) -> bool:
    """Whether a difference is one that a compiler of torch's may make."""
    if difference.kind == "stride" and program.door != "loaded":
        index = int(difference.what.rpartition(" ")[2])
        trace = given[difference.call]
        shape = trace.results[len(trace.results) - len(trace.strides) + index].shape
        return any(
            same_strides(shape, trace.strides[index], found)
            for compiled_at in range(difference.call + 1)
            if (found := fake_strides(program, difference.call, index, compiled_at)) is not None
        )
    if difference.kind == "error":
        return named_wrong_fake(program, difference)
    if difference.kind != "no error":
        return False
    # A compiled loop takes dtypes that torch's kernel lacks, and the fakes of products and writes do not compare them.
    # What is functional writes nothing over its operands.
    taken = ("not implemented for", "to have the same dtype", "source and destination dtypes match")
    taken += ("refer to a single memory location", "can't be cast to the desired output type")
    if any(text in difference.detail for text in taken) or unused_step_raises(program):
        return True
    return overwritten_step_raises(program, difference.call, given)


def named_wrong_fake(program: Program, difference: Difference) -> bool:
    """Whether an error names the custom op whose fake function is wrong."""
    wrong = [step for step in program.steps if "wrong fake" in step.features]
    names = {name for step in wrong for name in re.findall(r"ops\.(fuzz\.\w+)", step.text)}
    return any(name in difference.detail.replace("::", ".") for name in names)


def overwritten_step_raises(program: Program, number: int, given: Sequence[CallTrace]) -> bool:
    """Whether what was compiled did all that the program does without the write that raises: later ones hide it."""
    ran: list[Step] = []

    def watched(step: Step, values: Mapping[str, Any], names: dict[str, Any], widen: bool) -> Any:
        ran.append(step)
        return execute.run_step(step, values, names, widen)

    model, kept = execute.module(program)
    made = execute.calls(program, execute.interpreted(program, model, make=watched), kept, watch=False)
    if not ran or made[-1].error is None or ran[-1].makes:
        return False
    place = (len(ran) - 1) % len(program.steps)
    smaller = replace(program, steps=program.steps[:place] + program.steps[place + 1 :])
    model, kept = execute.module(smaller)
    expected = execute.calls(smaller, execute.plain(model), kept, watch=program.door != "loaded")
    whole = min(number, len(expected) - 1) + 1
    return not differences(expected[:whole], given[:whole], Budget(smaller), program.door != "loaded")


def fake_strides(program: Program, number: int, index: int, compiled_at: int = 0) -> tuple[int, ...] | None:
    """The strides of a result by the fake functions of its ops, which compilers follow; None where one has none.

    The fakes of a few of torch's ops give others than their kernels do. Those of attention depend on the backends that
    are allowed: ``compiled_at`` is the call whose backends count.
    """
    allowed = replace(program.calls[compiled_at], vendor="")
    model, _ = execute.module(program)
    kept = {one.name: getattr(model, one.name).data for one in program.of_role(*execute.KEPT)}
    given = [memory.make(program, call, ("argument",))[1] | kept for call in range(number + 1)]
    values: dict[str, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), execute.circumstances(allowed):
        for call, tensors in enumerate(given):
            results = [values.get(name) for name in program.returns] if call else []
            values = {name: mode.from_tensor(one) for name, one in tensors.items()}
            fed = (
                (name, results[place])
                for name, place in program.calls[call].feed.items()
                if place < len(results)
            )
            values |= {name: one for name, one in fed if one is not None and name in values}
            values |= program.calls[call].numbers
            _run(program, values)
    found = values.get(program.returns[index])
    return None if found is None else found.stride()


def _run(program: Program, values: dict[str, Any]) -> None:
    """Add what the steps make to ``values``; what has no fake, and what is made of it, is judged by eager."""
    for step in program.steps:
        try:
            made = execute.run_step(step, values, execute.namespace())
        except Exception:  # noqa: BLE001 - fake functions raise what they like
            continue
        if step.makes:
            values[step.makes] = made


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
    if only_its_sizes_count(program, made):
        return True
    smaller = without(program, [index for index, step in enumerate(program.steps) if step.makes == made])
    gone = {step.makes for step in program.steps} - {step.makes for step in smaller.steps}
    lost = [step for step in program.steps if step not in smaller.steps]
    return smaller.returns == program.returns and all(
        "write" not in step.features or step.uses[0] in gone for step in lost
    )


_SIZES = r"\{%d\}\.(numel\(\)|dim\(\)|shape\b|size\()"


def only_its_sizes_count(program: Program, made: str) -> bool:
    """Whether of a step's result nothing reaches the results and the memory of a program but sizes."""
    values = {made}
    for step in program.steps:
        reads = [
            name in values and f"{{{place}}}" in re.sub(_SIZES % place, "", step.text)
            for place, name in enumerate(step.uses)
        ]
        if not any(reads):
            continue
        if not step.makes and step.uses[0] not in values:
            return False
        values.add(step.makes or step.uses[0])
    return values.isdisjoint(program.returns) and values.isdisjoint(one.name for one in program.inputs)
