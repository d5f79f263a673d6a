"""What is drawn: the same for a seed, all of what it is meant to cover, and readable again from its text."""

import subprocess
import sys
from collections import Counter

import pytest

from tests.fuzz import memory
from tests.fuzz.check import eagerly
from tests.fuzz.families import FAMILIES
from tests.fuzz.generate import generate
from tests.fuzz.program import DOORS, Program, from_json
from tests.workers import ROOT

_COVERED = (
    *(family.name for family in FAMILIES),
    *(f"door {door}" for door in DOORS),
    *(f"layout {layout}" for layout in memory.LAYOUTS),
    *(f"content {kind}" for kind in memory.CONTENTS),
    *("role argument", "role buffer", "role weight", "size 0", "size 1", "result fed back"),
    *(f"alias {role} {how}" for role in ("argument", "buffer") for how in ("same", "view", "shift")),
    *(
        "write to argument",
        "write to buffer",
        "write to an intermediate",
        "argument returned",
        "buffer returned",
    ),
    *("changed sizes", "changed layout", "changed dtype", "changed content", "result written by the caller"),
    *("attention backend switched", "vendor switched", "two threads", "dlinfer op"),
)


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return [generate(seed) for seed in range(400)]


def test_a_seed_gives_the_same_program_always():
    assert [generate(seed).to_json() for seed in range(20)] == [
        generate(seed).to_json() for seed in range(20)
    ]


@pytest.mark.full
def test_a_program_is_read_again_from_its_text(programs: list[Program]):
    assert [from_json(program.to_json()) for program in programs[:50]] == programs[:50]


@pytest.mark.full
def test_everything_is_drawn(programs: list[Program]):
    counts = Counter(feature for program in programs for feature in program.features())
    assert [name for name in _COVERED if not counts[name]] == []


@pytest.mark.full
def test_most_calls_run_and_some_raise(programs: list[Program]):
    first = [eagerly(program) for program in programs[:150]]
    raised = sum(traces[-1].error is not None for traces in first)
    assert 5 <= raised <= 50
    assert sum(len(traces) == 1 and traces[0].error is not None for traces in first) <= 5


_DIVISIONS = """
import torch
from tests.fuzz.families_compute import _INTEGER
from tests.fuzz.generate import INTEGERS
for kind in map(torch.iinfo, {getattr(torch, name) for name in INTEGERS}):
    dtype = getattr(torch, kind.dtype)
    least = torch.full((64,), kind.min, dtype=dtype)
    for other in (torch.full((64,), -1 if kind.min else 255).to(dtype), -1 if kind.min else 1, 2):
        for text in _INTEGER:
            eval(text.format("least", "other"), {"torch": torch, "least": least, "other": other})
"""


@pytest.mark.full
def test_no_arithmetic_of_whole_numbers_ends_the_process():
    """torch's least number // -1 does, and % -1: SIGFPE."""
    ended = subprocess.run(
        [sys.executable, "-c", _DIVISIONS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])
