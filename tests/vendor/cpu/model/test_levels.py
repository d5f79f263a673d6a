"""The C++ kernels' tests at the levels that this CPU lacks, where software computes what their instructions do."""

import pytest

from dlinfer.vendor.cpu import isa
from tests.isa import run
from tests.isa.levels import LEVELS, Level
from tests.vendor.cpu.test_native import needs_compiler

LACKING = [level for level in LEVELS if level.is_model and isa.missing(isa.modelled(level.value))]
# Most of these take their time for what no instruction changes; `make test-isa` runs them too.
LEFT_OUT = ("test_isa.py", "test_kernels.py", "test_native_sampling.py", "test_native_fill.py")


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)  # of compiling, and some hundred tests
@pytest.mark.skipif(not LACKING, reason="this CPU has every level's instructions")
@pytest.mark.skipif(bool(isa.missing("avx2")), reason="this CPU has no AVX2, which the model is compiled for")
@pytest.mark.parametrize("level", LACKING, ids=[level.value for level in LACKING])
def test_kernels(level: Level) -> None:
    tests = [test for test in run.selected(level) if not test.endswith(LEFT_OUT)]
    result = run.run(level, tests)
    assert result["status"] == 0, "\n".join(result["tail"])
    assert result["counts"]["passed"] > 500
