"""Make a program that shows a fault smaller, while it still shows it."""

import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.program import Call, Input, Program, Step

StillFails = Callable[[Program], bool]


def shrink(program: Program, still_fails: StillFails, seconds: float) -> Program:
    """The smallest program found in so many seconds that still fails."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for candidate in _smaller(program):
            if time.monotonic() > end:
                break
            if still_fails(candidate):
                program, progress = candidate, True
                break  # what the smaller one allows may differ
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Simpler programs, the greatest steps first. Each may be one that does not run."""
    texts = {program.to_json()}
    for candidate in _candidates(program):
        pruned = candidate.pruned()
        text = pruned.to_json()
        if text not in texts:
            texts.add(text)
            yield pruned


def _candidates(program: Program) -> Iterator[Program]:
    count = len(program.calls)
    if count > 1:
        yield replace(program, calls=program.calls[:1])
        yield from (replace(program, calls=program.calls[:i] + program.calls[i + 1 :]) for i in range(count))
    if program.threads:
        yield replace(program, threads=False)
    if program.door != "compile":
        yield replace(program, door="compile")
    steps = len(program.steps)
    size = steps // 2
    while size >= 1:
        for start in range(steps - size, -1, -size):
            yield without(program, range(start, start + size))
        size //= 2
    yield from (bypassed(program, index) for index in range(steps))
    if len(program.returns) > 1:
        yield from (replace(program, returns=(name,)) for name in program.returns)
        yield from (
            replace(program, returns=_left_out(program.returns, i)) for i in range(len(program.returns))
        )
    yield from _plainer_calls(program)
    yield from _plainer_inputs(program)
    if program.dynamic is not None:
        yield replace(program, dynamic=None)
    yield from _plainer_steps(program)


def without(program: Program, places: Collection[int]) -> Program:
    """Without some steps and all that reads their results."""
    gone = {program.steps[place].makes for place in places} - {""}
    kept: list[Step] = []
    for place, step in enumerate(program.steps):
        read = {name for index, name in enumerate(step.uses) if f"{{{index}}}" in step.text}
        left = [name for name in step.uses if name not in gone]
        if place in places or gone & read or (step.uses and not left):
            gone |= {step.makes} - {""}
        else:  # what it names and does not read may be anything
            kept.append(replace(step, uses=tuple(left[0] if name in gone else name for name in step.uses)))
    return replace(program, steps=tuple(kept), returns=_returns(program, kept, gone))


def bypassed(program: Program, index: int) -> Program:
    """Without a step; its readers read its first operand."""
    step = program.steps[index]
    if not step.makes or not step.uses:
        return program
    names = {step.makes: step.uses[0]}
    steps = [replace(one, uses=tuple(names.get(name, name) for name in one.uses)) for one in program.steps]
    steps.pop(index)
    return replace(
        program, steps=tuple(steps), returns=tuple(names.get(name, name) for name in program.returns)
    )


def _returns(program: Program, steps: list[Step], gone: set[str]) -> tuple[str, ...]:
    kept = tuple(name for name in program.returns if name not in gone)
    made = [step.makes for step in steps if step.makes] or [one.name for one in program.inputs]
    return kept or tuple(made[-1:])


def _left_out(names: tuple[str, ...], index: int) -> tuple[str, ...]:
    return names[:index] + names[index + 1 :]


def _plainer_calls(program: Program) -> Iterator[Program]:
    plain = {"changes": {}, "feed": {}, "sdpa": "", "vendor": "", "write": -1}
    for number, call in enumerate(program.calls):
        for name, value in plain.items():
            if getattr(call, name) != value:
                yield _with_call(program, number, **{name: value})
        for name, change in call.changes.items():
            yield _with_call(program, number, changes={n: c for n, c in call.changes.items() if n != name})
            if len(change) > 1:
                for gone in change:
                    left = {key: value for key, value in change.items() if key != gone}
                    yield _with_call(program, number, changes=call.changes | {name: left})
    names = sorted({size for call in program.calls for size in call.sizes})
    for name in names:
        largest = max(call.sizes.get(name, 0) for call in program.calls)
        for number in (1, 2, 3, 4):
            if number < largest:
                yield replace(
                    program, calls=tuple(replace(c, sizes=c.sizes | {name: number}) for c in program.calls)
                )
    for number, call in enumerate(program.calls[1:], 1):
        if call.sizes != program.calls[0].sizes:
            yield _with_call(program, number, sizes=dict(program.calls[0].sizes))


def _with_call(program: Program, number: int, **given: Any) -> Program:
    calls: list[Call] = list(program.calls)
    calls[number] = replace(calls[number], **given)
    return replace(program, calls=tuple(calls))


def _plainer_inputs(program: Program) -> Iterator[Program]:
    for index, one in enumerate(program.inputs):
        for plain in (
            {"alias": ()},
            {"layout": "plain"},
            {"content": "normal"} if one.content in ("extreme", "special", "whole") else {"content": "same"},
            {"role": "argument"},
            {"dtype": "float32"} if "float" in one.dtype else {"dtype": "int64"},
            {"shape": one.shape[1:]},
        ):
            if one.content in ("index", "beyond", "slots") and ("content" in plain or "dtype" in plain):
                continue
            if any(getattr(one, name) != value for name, value in plain.items()):
                yield _with_input(program, index, one, plain)
        for dim, size in enumerate(one.shape):
            if isinstance(size, int) and size > 2:
                for number in (1, 2, size // 2):
                    yield _with_input(
                        program, index, one, {"shape": (*one.shape[:dim], number, *one.shape[dim + 1 :])}
                    )


def _with_input(program: Program, index: int, one: Input, given: dict[str, Any]) -> Program:
    inputs = list(program.inputs)
    inputs[index] = replace(one, **given)
    return replace(program, inputs=tuple(inputs))


def _plainer_steps(program: Program) -> Iterator[Program]:
    """Without the method calls at the end of an expression, one by one."""
    for index, step in enumerate(program.steps):
        shorter = re.sub(r"\.\w+\([^()]*\)$", "", step.text)
        if step.makes and shorter != step.text and "{0}" in shorter:
            steps = list(program.steps)
            steps[index] = replace(step, text=shorter)
            yield replace(program, steps=tuple(steps))
