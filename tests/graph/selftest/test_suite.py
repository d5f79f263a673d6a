"""Self-tests: run once, kept on disk by what they depend on, and a reason where they fail."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlinfer import settings
from dlinfer.graph.cache import fingerprint
from dlinfer.graph.cache.disk import CacheWarning
from dlinfer.graph.selftest.case import Case, NotSupportedError, Result
from dlinfer.graph.selftest.suite import SelfTest, WrongResult, is_running

inf, nan = float("inf"), float("nan")


class Library:
    """Something that doubles, rightly or not, and counts how often it runs."""

    def __init__(self, factor: float = 2.0, version: str = "Library 1.0") -> None:
        self.factor, self.version, self.runs = factor, version, 0
        self.selftest = SelfTest(lambda: self.version, self.cases)

    def double(self) -> list[torch.Tensor]:
        self.runs += 1
        return [torch.tensor([1.0, 2.0, nan]) * self.factor]

    def cases(self) -> list[Case]:
        right = [torch.tensor([2.0, 4.0, nan])]
        return [Case("twice", {"aten.mul"}, "float32", self.double, lambda: right)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path):
    with settings.override(cache_dir=str(tmp_path)):
        yield tmp_path / "selftest"


def test_a_right_result_is_run_once_and_kept_for_other_processes(folder):
    library = Library()
    assert [library.selftest.failure("aten.mul", "float32") for _ in range(3)] == [None] * 3
    assert library.runs == 1
    assert len(list(folder.iterdir())) == 1
    again = Library()
    assert again.selftest.failure("aten.mul", "float32") is None
    assert again.runs == 0


def test_a_wrong_result_is_a_reason_that_names_library_case_and_numbers(folder):
    reason = Library(3.0).selftest.failure("aten.mul", "float32")
    assert reason == (
        "Library 1.0 on this CPU gets 'twice' wrong in float32: "
        "2 of 3 elements of result 0 are wrong; the first is 3, expected 2"
    )
    assert isinstance(reason, WrongResult)
    kept = Library(3.0)
    assert kept.selftest.failure("aten.mul", "float32") == reason
    assert kept.runs == 0


def test_only_what_a_case_covers_is_refused():
    selftest = Library(3.0).selftest
    assert selftest.failure("aten.add", "float32") is None
    assert selftest.failure("aten.mul", "bfloat16") is None


def raises(library: Library, error: BaseException) -> None:
    def run():
        library.runs += 1
        raise error

    library.double = run
    library.selftest = SelfTest(lambda: library.version, library.cases)


@pytest.mark.parametrize(
    "error", [RuntimeError("first\nbad combination"), OSError(28, "No space left on device"), MemoryError()]
)
def test_an_error_is_a_reason_in_this_process_and_the_next_runs_again(error, folder):
    library = Library()
    raises(library, error)
    for _ in range(3):
        reason = library.selftest.failure("aten.mul", "float32")
        assert reason is not None and not isinstance(reason, WrongResult)
        assert reason.startswith(
            f"Library 1.0 raised an error in the self-test 'twice' in float32: {type(error).__name__}"
        )
    assert library.runs == 1
    assert [one.state for one in library.selftest.results()] == ["error"]
    assert not folder.exists() or not list(folder.iterdir())
    again = Library()
    assert again.selftest.failure("aten.mul", "float32") is None
    assert again.runs == 1


def test_an_interruption_ends_the_case_which_runs_again_in_the_same_process(folder, monkeypatch):
    """Ctrl-C reaches the thread that waits, and the compiler that the other one waits for."""
    library = Library()
    waits = threading.Thread.join

    def interrupted(thread, timeout=None):
        waits(thread, timeout)
        raise KeyboardInterrupt

    raises(library, RuntimeError("the C++ compiler was interrupted"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            library.selftest.failure("aten.mul", "float32")
    del library.double
    library.selftest._cases = None
    assert library.selftest.failure("aten.mul", "float32") is None
    assert len(list(folder.iterdir())) == 1


def test_a_wrong_result_goes_before_an_error():
    library = Library(3.0)

    def fails():
        raise RuntimeError("no compiler")

    (wrong,) = library.cases()
    failing = replace(wrong, name="failing", run=fails)
    library.selftest = SelfTest(lambda: "Library 1.0", lambda: [failing, wrong])
    assert isinstance(library.selftest.failure("aten.mul", "float32"), WrongResult)


def test_a_sentence_alone_is_no_wrong_result():
    assert not isinstance("my op on this CPU gets slow", WrongResult)


def test_one_that_is_not_supported_runs_again(folder):
    other = Library()
    raises(other, NotSupportedError("no such op"))
    assert other.selftest.failure("aten.mul", "float32") is None
    assert [one.reason for one in other.selftest.results()] == ["no such op"]
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("damage", [b"", b"x", b"0" * 64 + b"\n{}"])
def test_a_damaged_file_counts_as_missing(folder, damage):
    Library(3.0).selftest.failure("aten.mul", "float32")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage or whole[:-3])
    library = Library(3.0)
    assert library.selftest.failure("aten.mul", "float32")
    assert library.runs == 1
    assert path.read_bytes() == whole


def test_a_cut_or_altered_result_never_passes_for_a_right_one(folder):
    Library(3.0).selftest.failure("aten.mul", "float32")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"failed"', b'"passed"'))
    library = Library(3.0)
    assert library.selftest.failure("aten.mul", "float32")
    assert library.runs == 1


def test_another_isa_or_cpu_or_version_runs_anew(monkeypatch):
    def runs(version: str = "Library 1.0") -> int:
        library = Library(version=version)
        library.selftest.failure("aten.mul", "float32")
        return library.runs

    assert (runs(), runs(), runs("Library 1.1")) == (1, 0, 1)
    monkeypatch.setattr(fingerprint, "_forced_isa", lambda: {"ONEDNN_MAX_CPU_ISA": "another"})
    assert (runs(), runs()) == (1, 0)
    with settings.override(cpu_isa="sse42" if settings.current().cpu_isa == "avx2" else "avx2"):
        assert (runs(), runs()) == (1, 0)
    monkeypatch.setattr(fingerprint, "cpu_model", lambda: "another CPU")
    assert (runs(), runs()) == (1, 0)


def test_the_caller_s_modes_are_no_reason_to_run_again():
    Library().selftest.failure("aten.mul", "float32")
    library = Library()
    with torch.autocast("cpu"), torch.device("meta"):
        library.selftest.failure("aten.mul", "float32")
    assert library.runs == 0


def test_what_cannot_run_now_runs_when_it_can():
    library, why = Library(3.0), ["not yet"]
    one = replace(library.cases()[0], skip_reason=lambda: why[0] if why else None)
    library.selftest = SelfTest(lambda: "Library 1.0", lambda: [one])
    assert library.selftest.failure("aten.mul", "float32") is None
    assert [(v.state, v.reason) for v in library.selftest.results()] == [("not run", "not yet")]
    why.clear()
    assert library.selftest.failure("aten.mul", "float32")
    assert library.runs == 1


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=str(tmp_path / "file")), pytest.warns(CacheWarning):
        assert Library(3.0).selftest.failure("aten.mul", "float32")


def test_it_runs_outside_the_caller_s_modes():
    seen = []

    def run() -> list[torch.Tensor]:
        seen.append(
            (
                is_running(),
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.ones(1).device.type,
            )
        )
        return [torch.tensor([2.0, 4.0, nan])]

    library = Library()
    library.double = run
    library.selftest = SelfTest(lambda: "Library 1.0", library.cases)
    with torch.autocast("cpu"), torch.device("meta"):
        assert library.selftest.failure("aten.mul", "float32") is None
    assert seen == [(True, False, False, "cpu")]
    assert not is_running()


def test_threads_run_it_once():
    library = Library(3.0)
    reasons: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: reasons.append(library.selftest.failure("aten.mul", "float32")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(reasons)) == 1
    assert len(reasons) == 8
    assert library.runs == 1


def test_results_show_what_never_ran():
    library = Library()
    (before,) = library.selftest.results(run=False)
    assert (before.state, library.runs) == ("not run", 0)
    assert library.selftest.results() == [Result("twice", "float32", ("aten.mul",), "passed")]
    assert library.selftest.results(run=False) == library.selftest.results()
