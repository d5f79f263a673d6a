"""A short run of the fuzzer: the same programs each time, on each engine (the long run is ``make fuzz``)."""

import pytest

from dlinfer import settings
from tests.caches import fresh_cache
from tests.fuzz.check import check
from tests.fuzz.generate import generate
from tests.fuzz.program import ENGINES

PROGRAMS = range(6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_programs_do_what_eager_ones_do(engine: str, tmp_path):
    """inductor's loops run node by node here, so that nothing waits for g++."""
    found, taken = {}, 0
    with settings.override(cache_dir=str(fresh_cache(tmp_path)), fallback="allow"):
        for seed in PROGRAMS:
            verdict = check(generate(seed), engine, interpreted=engine == "inductor")
            taken += verdict.taken
            if verdict.differences and not verdict.torch:
                found[seed] = str(verdict.differences[0])
    assert found == {}
    assert taken > 2 * len(PROGRAMS)
