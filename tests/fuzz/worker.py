"""The process that runs programs: one line of JSON in, one out, so that a crash or a hang ends nothing but itself."""

import dataclasses
import faulthandler
import logging
import os
import warnings

from tests.fuzz.program import Program, from_json
from tests.jobs import answer_jobs


def main() -> None:
    """Answer jobs until the end of the input."""
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    from tests.fuzz import planted

    planted.plant(os.environ.get(planted.VARIABLE, ""))
    answer_jobs(_answer)


def _answer(job: dict) -> dict:
    from tests.fuzz.check import check
    from tests.fuzz.generate import generate

    program: Program = from_json(job["program"]) if "program" in job else generate(job["seed"])
    answer = {"program": program.to_json(), "features": sorted(program.features())}
    if job.get("generate"):
        return answer
    verdict = check(program, job["engine"], job.get("interpreted", False))
    return answer | dataclasses.asdict(verdict)


if __name__ == "__main__":
    main()
