"""Two threads whose calls fail at once: the library keeps one message for both."""

import threading

import pytest

from dlinfer.vendor.megengine.errors import LiteError
from dlinfer.vendor.megengine.lite import LiteNetwork
from dlinfer.vendor.megengine.lite.binding import failures
from dlinfer.vendor.megengine.lite.binding.library import library
from tests.graph.threads import together
from tests.vendor.megengine.running import loaded

DOUBT = "another thread's call failed at the same time"


@pytest.fixture
def patient(monkeypatch):
    """On a machine so busy that a thread does not get on for a while."""
    monkeypatch.setattr(failures, "_MOMENT", 300.0)


def complaint(network: LiteNetwork, name: str) -> str:
    with pytest.raises(LiteError) as raised:
        network.get_io_tensor(name)
    return str(raised.value)


def test_no_thread_gets_anothers_message_without_a_word(layer, patient):
    networks = [loaded(layer) for _ in range(2)]

    def mistakes(index: int) -> int:
        name = "left" if index else "right"
        said = [complaint(networks[index], name) for _ in range(1000)]
        return sum(f"must be {name} input" not in one and DOUBT not in one for one in said)

    assert together(2, mistakes) == [0, 0]


@pytest.fixture
def both_have_failed(monkeypatch):
    """No call of get_io_tensor comes back before another one has failed as well."""
    real, meeting = library()._library.LITE_get_io_tensor, threading.Barrier(2)

    def held(*arguments):
        status = real(*arguments)
        meeting.wait(300)
        return status

    monkeypatch.setattr(library()._library, "LITE_get_io_tensor", held)


def test_both_say_so_when_nobody_can_know(layer, patient, both_have_failed):
    networks = [loaded(layer) for _ in range(2)]
    said = together(2, lambda index: complaint(networks[index], "left" if index else "right"))
    assert all(DOUBT in one for one in said)
    assert len({one.partition("must be ")[2].split()[0] for one in said}) == 1  # the message that was kept


def test_a_message_of_ones_own_is_not_doubted(layer):
    """Not though another thread's call is under way all the time, nor though another one failed before."""
    network, ended = loaded(layer), threading.Event()

    def long(index: int) -> list[str]:
        if index:
            with library()._failures.watching():
                assert ended.wait(300)
            return []
        try:
            return [complaint(network, name) for name in ("left", "right")]
        finally:
            ended.set()

    said = together(2, long)[0]
    for name, one in zip(("left", "right"), said, strict=True):
        assert f"must be {name} input" in one
        assert DOUBT not in one
