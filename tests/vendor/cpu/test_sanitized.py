"""Faults planted in copies of the C++ sources, which ``make sanitize`` has to find."""

import shutil
from pathlib import Path

import pytest

from dlinfer.vendor.cpu import native
from tests.vendor.cpu.sanitized import races, run, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
NORMS = "tests/vendor/cpu/test_native_norm.py::test_boundaries"


def planted(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the sources that norms need, with one text exchanged for another."""
    sources = folder / "csrc"
    for name in ("common", "norm", "threads"):
        shutil.copytree(native.SOURCES / name, sources / name)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    return sources


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("narrow(out + i, rounded<T>(rounded", "narrow(out + i, rounded<T>(rounded", ""),  # as it is
        ("* float(weight[i]));", "* float(weight[i]) + 0 * float(weight[i + 1]));", "heap-buffer-overflow"),
        (
            "const float scale = 1.0f",
            "volatile int most = 2147483647 - (count > 0); most = most + int(count);\n  const float scale = 1.0f",
            "signed integer overflow",
        ),
    ],
    ids=["none", "a read behind the end", "an int that overflows"],
)
def test_address_and_undefined(old, new, found, tmp_path, capfd):
    sources = planted(tmp_path, "norm/norm.cpp", old, new)
    status = run([NORMS], sources=sources, folder=tmp_path / "made")
    said = "".join(capfd.readouterr())
    if not found:
        assert status == 0, said
    else:
        assert status != 0
        assert found in said
        assert "norm/norm.cpp:" in said  # with the line of the source


@pytest.mark.parametrize(
    ("old", "new", "status"),
    [
        (
            "state_.fetch_sub(1, std::memory_order_release);",
            "state_.fetch_sub(1, std::memory_order_release);",
            0,
        ),
        # A caller then may go on before it sees what its helpers have written.
        (
            "state_.fetch_sub(1, std::memory_order_release);",
            "state_.fetch_sub(1, std::memory_order_relaxed);",
            66,
        ),
        # A helper may see the place of a job and not the job.
        ("state_.store(kTaken | kOpen);", "state_.store(kTaken | kOpen, std::memory_order_relaxed);", 66),
        # A place is given away while a helper is in it.
        ("wait_for([&] { return (state_.load(std::memory_order_acquire) & kHelpers) == 0; });", "", 66),
    ],
    ids=["none", "a helper's results", "a helper's job", "a place in use"],
)
def test_races(old, new, status, tmp_path, capfd):
    assert races(planted(tmp_path, "threads/team.cpp", old, new)) == status, capfd.readouterr()
