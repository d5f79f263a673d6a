"""Known answers: run once, kept on disk by what they depend on, and a reason where they are wrong."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlinfer import settings
from dlinfer.graph.cache import fingerprint
from dlinfer.graph.cache.disk import CacheWarning
from dlinfer.graph.selftest.answer import KnownAnswer, NotTakenError, Verdict, what_is_wrong
from dlinfer.graph.selftest.suite import KnownAnswers, asking, is_fault

inf, nan = float("inf"), float("nan")


class Library:
    """Something that doubles, rightly or not, and counts how often it is asked."""

    def __init__(self, factor: float = 2.0, version: str = "Library 1.0") -> None:
        self.factor, self.version, self.asked = factor, version, 0
        self.known_answers = KnownAnswers(lambda: self.version, self.answers)

    def double(self) -> list[torch.Tensor]:
        self.asked += 1
        return [torch.tensor([1.0, 2.0, nan]) * self.factor]

    def answers(self) -> list[KnownAnswer]:
        right = [torch.tensor([2.0, 4.0, nan])]
        return [KnownAnswer("twice", frozenset({"aten.mul"}), "float32", self.double, lambda: right)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path):
    with settings.override(cache_dir=str(tmp_path)):
        yield tmp_path / "known_answers"


def test_a_right_answer_is_asked_once_and_kept_for_other_processes(folder):
    library = Library()
    assert [library.known_answers.fault("aten.mul", "float32") for _ in range(3)] == [None] * 3
    assert library.asked == 1
    assert len(list(folder.iterdir())) == 1
    again = Library()
    assert again.known_answers.fault("aten.mul", "float32") is None
    assert again.asked == 0


def test_a_wrong_answer_is_a_reason_that_names_library_answer_and_numbers(folder):
    reason = Library(3.0).known_answers.fault("aten.mul", "float32")
    assert reason == (
        "Library 1.0 on this CPU gets 'twice' wrong in float32: 2 of 3 elements are wrong, the first 3 and not 2"
    )
    assert is_fault(reason)
    kept = Library(3.0)
    assert kept.known_answers.fault("aten.mul", "float32") == reason
    assert kept.asked == 0


def test_only_what_an_answer_decides_is_refused():
    answers = Library(3.0).known_answers
    assert answers.fault("aten.add", "float32") is None
    assert answers.fault("aten.mul", "bfloat16") is None


def raises(library: Library, error: BaseException) -> None:
    def run():
        library.asked += 1
        raise error

    library.double = run
    library.known_answers = KnownAnswers(lambda: library.version, library.answers)


@pytest.mark.parametrize(
    "error", [RuntimeError("first\nbad combination"), OSError(28, "No space left on device"), MemoryError()]
)
def test_an_error_is_a_reason_in_this_process_and_the_next_asks_again(error, folder):
    library = Library()
    raises(library, error)
    for _ in range(3):
        reason = library.known_answers.fault("aten.mul", "float32")
        assert reason is not None and not is_fault(reason)
        assert reason.startswith(
            f"Library 1.0 failed in this process when asked 'twice' in float32: {type(error).__name__}"
        )
    assert library.asked == 1
    assert [one.state for one in library.known_answers.verdicts()] == ["failed"]
    assert not folder.exists() or not list(folder.iterdir())
    again = Library()
    assert again.known_answers.fault("aten.mul", "float32") is None
    assert again.asked == 1


def test_an_interruption_ends_the_question_which_is_asked_again_in_the_same_process(folder, monkeypatch):
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
            library.known_answers.fault("aten.mul", "float32")
    del library.double
    library.known_answers._table = None
    assert library.known_answers.fault("aten.mul", "float32") is None
    assert len(list(folder.iterdir())) == 1


def test_a_wrong_answer_goes_before_an_error():
    library = Library(3.0)

    def fails():
        raise RuntimeError("no compiler")

    (wrong,) = library.answers()
    failing = replace(wrong, name="failing", run=fails)
    library.known_answers = KnownAnswers(lambda: "Library 1.0", lambda: [failing, wrong])
    assert is_fault(library.known_answers.fault("aten.mul", "float32") or "")


def test_a_sentence_alone_is_no_wrong_answer():
    assert not is_fault("my op on this CPU gets slow")


def test_one_that_is_not_taken_is_asked_again(folder):
    other = Library()
    raises(other, NotTakenError("no such op"))
    assert other.known_answers.fault("aten.mul", "float32") is None
    assert [one.reason for one in other.known_answers.verdicts()] == ["no such op"]
    assert not folder.exists() or not list(folder.iterdir())


@pytest.mark.parametrize("damage", [b"", b"x", b"0" * 64 + b"\n{}"])
def test_a_damaged_file_is_asked_again(folder, damage):
    Library(3.0).known_answers.fault("aten.mul", "float32")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage or whole[:-3])
    library = Library(3.0)
    assert library.known_answers.fault("aten.mul", "float32")
    assert library.asked == 1
    assert path.read_bytes() == whole


def test_a_cut_or_altered_verdict_never_passes_for_a_right_one(folder):
    Library(3.0).known_answers.fault("aten.mul", "float32")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"wrong"', b'"right"'))
    library = Library(3.0)
    assert library.known_answers.fault("aten.mul", "float32")
    assert library.asked == 1


def test_another_isa_or_cpu_or_version_is_asked_anew(monkeypatch):
    def asked(version: str = "Library 1.0") -> int:
        library = Library(version=version)
        library.known_answers.fault("aten.mul", "float32")
        return library.asked

    assert (asked(), asked(), asked("Library 1.1")) == (1, 0, 1)
    monkeypatch.setattr(fingerprint, "_forced_isa", lambda: {"ONEDNN_MAX_CPU_ISA": "another"})
    assert (asked(), asked()) == (1, 0)
    with settings.override(cpu_isa="sse42" if settings.current().cpu_isa == "avx2" else "avx2"):
        assert (asked(), asked()) == (1, 0)
    monkeypatch.setattr(fingerprint, "cpu_model", lambda: "another CPU")
    assert (asked(), asked()) == (1, 0)


def test_the_caller_s_modes_are_no_reason_to_ask_again():
    Library().known_answers.fault("aten.mul", "float32")
    library = Library()
    with torch.autocast("cpu"), torch.device("meta"):
        library.known_answers.fault("aten.mul", "float32")
    assert library.asked == 0


def test_what_cannot_be_asked_now_is_asked_when_it_can():
    library, why = Library(3.0), ["not yet"]
    one = replace(library.answers()[0], unfit=lambda: why[0] if why else None)
    library.known_answers = KnownAnswers(lambda: "Library 1.0", lambda: [one])
    assert library.known_answers.fault("aten.mul", "float32") is None
    assert [(v.state, v.reason) for v in library.known_answers.verdicts()] == [("not asked", "not yet")]
    why.clear()
    assert library.known_answers.fault("aten.mul", "float32")
    assert library.asked == 1


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path):
    (tmp_path / "file").write_text("")
    with settings.override(cache_dir=str(tmp_path / "file")), pytest.warns(CacheWarning):
        assert Library(3.0).known_answers.fault("aten.mul", "float32")


def test_it_runs_outside_the_caller_s_modes():
    seen = []

    def run() -> list[torch.Tensor]:
        seen.append(
            (asking(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.ones(1).device.type)
        )
        return [torch.tensor([2.0, 4.0, nan])]

    library = Library()
    library.double = run
    library.known_answers = KnownAnswers(lambda: "Library 1.0", library.answers)
    with torch.autocast("cpu"), torch.device("meta"):
        assert library.known_answers.fault("aten.mul", "float32") is None
    assert seen == [(True, False, False, "cpu")]
    assert not asking()


def test_threads_ask_once():
    library = Library(3.0)
    reasons: list[str | None] = []
    threads = [
        threading.Thread(target=lambda: reasons.append(library.known_answers.fault("aten.mul", "float32")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(reasons)) == 1
    assert len(reasons) == 8
    assert library.asked == 1


def test_verdicts_show_what_was_never_asked():
    library = Library()
    (before,) = library.known_answers.verdicts(ask=False)
    assert (before.state, library.asked) == ("not asked", 0)
    assert library.known_answers.verdicts() == [Verdict("twice", "float32", ("aten.mul",), "right")]
    assert library.known_answers.verdicts(ask=False) == library.known_answers.verdicts()


@pytest.mark.parametrize(
    ("given", "right", "tolerance", "wrong"),
    [
        ([1.0], [1.0], 0.0, None),
        ([nan, inf, -inf, -0.0], [nan, inf, -inf, 0.0], 0.0, None),
        ([1.0], [nan], 9.0, "the first 1 and not nan"),
        ([nan], [1.0], 9.0, "the first nan and not 1"),
        ([inf], [-inf], 9.0, "the first inf and not -inf"),
        ([3e38], [inf], 9.0, "the first 3e+38 and not inf"),
        ([1.001], [1.0], 0.001, None),
        ([1.01], [1.0], 0.001, "1 of 1 elements"),
        ([True, True], [True, False], 9.0, "the first True and not False"),
        ([2**24 + 1], [2**24], 9.0, f"the first {2**24 + 1} and not {2**24}"),
        ([1.0], [1.0, 2.0], 0.0, r"float32\[1\] and not float32\[2\]"),
        ([1], [1.0], 0.0, r"int64\[1\] and not float32\[1\]"),
    ],
)
def test_what_is_wrong(given, right, tolerance, wrong):
    found = what_is_wrong([torch.tensor(given)], [torch.tensor(right)], tolerance)
    assert found is None if wrong is None else wrong.replace("\\", "") in str(found)
