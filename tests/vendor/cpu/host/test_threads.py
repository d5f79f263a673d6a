"""torch's number of threads is lowered to those that can run at once, unless the user chose it."""

import pytest
import torch

from dlinfer.vendor.cpu.host import threads
from dlinfer.vendor.cpu.host.cpus import UsableCpus


@pytest.fixture
def run_by(monkeypatch: pytest.MonkeyPatch):
    """The number of threads after ``fit_threads`` on 8 cores of 16 logical CPUs with a quota."""

    def fitted(before: int, quota: float | None) -> int:
        chosen = [before]
        cpus = UsableCpus(frozenset(range(16)), 8, 1, 16, quota)
        monkeypatch.setattr(threads, "usable_cpus", lambda: cpus)
        monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
        monkeypatch.setattr(torch, "set_num_threads", chosen.append)
        threads.fit_threads()
        return chosen[-1]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    return fitted


@pytest.mark.parametrize(
    ("before", "quota", "after"), [(8, 3.5, 4), (16, 2, 2), (8, None, 8), (16, None, 8), (5, 2, 5), (1, 2, 1)]
)
def test_a_default_is_lowered_and_a_choice_stays(run_by, before, quota, after):
    assert run_by(before, quota) == after


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_users_variable_stays(run_by, monkeypatch, name):
    monkeypatch.setenv(name, "8")
    assert run_by(8, 2) == 8
