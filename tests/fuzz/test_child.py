"""A worker's end is an answer, too."""

import dataclasses
from pathlib import Path

import pytest

from tests.fuzz.child import Child, Ended
from tests.fuzz.generate import generate
from tests.fuzz.program import Step


@pytest.mark.full
@pytest.mark.slow
def test_a_crash_and_a_hang_are_told_apart_and_the_next_program_runs(tmp_path: Path):
    sound = generate(1)
    steps = {"crash": "__import__('os').abort()", "hang": "__import__('time').sleep(90)"}
    with Child(tmp_path) as child:
        job = {"engine": "inductor", "interpreted": True, "program": sound.to_json()}
        assert "differences" in child.ask(job, 60)
        for kind, text in steps.items():
            program = dataclasses.replace(sound, steps=(*sound.steps, Step("", text, ())))
            with pytest.raises(Ended) as ended:
                child.ask({**job, "program": program.to_json()}, 3 if kind == "hang" else 60)
            assert ended.value.kind == kind
            assert "differences" in child.ask(job, 60)
