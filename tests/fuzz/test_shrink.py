"""A program becomes what shows its fault, and no more."""

import dataclasses

from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.shrink import bypassed, shrink, without


def _with_steps(least: int) -> Program:
    programs = map(generate, range(10**6))
    return next(one for one in programs if len(one.steps) >= least and len(one.calls) > 2)


def test_one_step_is_left_of_many():
    program = _with_steps(10)
    wanted = program.steps[0].text
    small = shrink(program, lambda one: any(step.text == wanted for step in one.steps), 60)
    assert [step.text for step in small.steps] == [wanted]
    assert (len(small.calls), len(small.returns), small.door, small.threads, small.dynamic) == (
        1,
        1,
        "compile",
        False,
        None,
    )
    assert not any(call.changes or call.feed for call in small.calls)
    assert {one.layout for one in small.inputs} == {"plain"}


def test_what_is_needed_stays():
    program = dataclasses.replace(_with_steps(10), threads=True, door="loaded")
    small = shrink(program, lambda one: one.threads and one.door == "loaded" and len(one.calls) > 1, 60)
    assert small.threads and small.door == "loaded" and len(small.calls) == 2


def test_a_program_that_no_longer_fails_is_left_as_it_is():
    program = _with_steps(5)
    assert shrink(program, lambda one: False, 5) is program


def test_steps_go_with_their_readers_or_give_way_to_their_operands():
    program = _with_steps(8)
    place = next(i for i, step in enumerate(program.steps) if step.makes and step.uses)
    name = program.steps[place].makes
    for smaller in (without(program, range(place, place + 1)), bypassed(program, place)):
        assert name not in {used for step in smaller.steps for used in step.uses} | {*smaller.returns}
