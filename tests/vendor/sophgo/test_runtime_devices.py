"""Who waits for whom where several threads open devices. Without a toolchain: the workers are stand-ins."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dlinfer import settings
from dlinfer.vendor.sophgo.errors import SophgoCallError
from dlinfer.vendor.sophgo.runtime import chips, device
from tests.waiting import SECONDS, until


class StandIn:
    """Answers as a worker; each of its calls, and its start, waits for the events that ``waits`` has of it."""

    alive = True

    def __init__(self, chip: str, waits: dict[str, threading.Event], begun: Callable[[str], None]) -> None:
        self.chip, self.waits, self.begun = chip, waits, begun
        self._passed("start")

    def call(self, name: str, device: int) -> dict[str, Any]:
        self._passed(f"{name} {device}")
        return {"chip_id": chips.KINDS[self.chip].chip_id, "serial": ""}

    def _passed(self, what: str) -> None:
        self.begun(f"{self.chip} {what}")
        if what in self.waits:
            assert self.waits[what].wait(SECONDS)


@pytest.fixture
def workers(monkeypatch):
    """``slow(chip, what)`` gives an event that the stand-in waits for; ``begun`` says what began, in order."""
    monkeypatch.setattr(device, "_workers", weakref.WeakValueDictionary())
    monkeypatch.setattr(device, "_devices", weakref.WeakValueDictionary())
    monkeypatch.setattr(device, "_latest", {})
    waits: dict[str, dict[str, threading.Event]] = {chip: {} for chip in chips.KINDS}
    begun: list[str] = []
    monkeypatch.setattr(device, "_started", lambda _key, _lib, chip: StandIn(chip, waits[chip], begun.append))
    monkeypatch.setattr(chips, "find", lambda: chips.Found(None, tuple(chips.KINDS), "stand-ins"))

    def slow(chip: str, what: str) -> threading.Event:
        return waits[chip].setdefault(what, threading.Event())

    with settings.override(sophgo_emulate=""):
        yield slow, begun


def stand_in_of(opened: device.Device) -> Any:
    """Its stand-in."""
    return opened.worker


class Opening(threading.Thread):
    """Opens a device in a thread of its own."""

    def __init__(self, number: int, chip: str) -> None:
        super().__init__(daemon=True)
        self.arguments = number, chip
        self.opened: device.Device | None = None
        self.start()

    def run(self) -> None:
        self.opened = device.open_device(*self.arguments)


@pytest.mark.parametrize("what", ["start", "open 0"])
def test_a_slow_chip_keeps_nobody_from_another(workers, what):
    """Whether its worker is slow to start or the worker to open the device."""
    slow, begun = workers
    go = slow("bm1684x", what)
    waiting = Opening(0, "bm1684x")
    until(lambda: f"bm1684x {what}" in begun)
    other = Opening(0, "bm1688")
    other.join(SECONDS)
    assert other.opened is not None
    assert other.opened.chip == "bm1688"
    assert waiting.is_alive()
    go.set()
    waiting.join(SECONDS)
    assert waiting.opened is not None
    assert waiting.opened.chip == "bm1684x"


def test_an_open_device_is_had_while_another_of_its_chip_is_being_opened(workers):
    slow, begun = workers
    there = device.open_device(3, "bm1688")
    go = slow("bm1688", "open 4")
    waiting = Opening(4, "bm1688")
    until(lambda: "bm1688 open 4" in begun)
    again = Opening(3, "bm1688")
    again.join(SECONDS)
    assert again.opened is there
    assert waiting.is_alive()
    go.set()
    waiting.join(SECONDS)
    assert waiting.opened is not None


def test_threads_that_open_one_device_share_it_and_its_worker(workers):
    slow, begun = workers
    go = slow("bm1684x", "start")
    threads = [Opening(0, "bm1684x") for _ in range(8)]
    go.set()
    for thread in threads:
        thread.join(SECONDS)
    assert len({id(thread.opened) for thread in threads}) == 1
    assert threads[0].opened is not None
    assert begun == ["bm1684x start", "bm1684x open 0"]


def test_a_device_of_a_dead_worker_is_opened_anew(workers):
    before = device.open_device(0, "bm1684x")
    stand_in_of(before).alive = False
    after = device.open_device(0, "bm1684x")
    assert after is not before
    assert after.worker is not before.worker
    assert device.open_device(0) is after  # of the chip that was opened last


@pytest.mark.parametrize("number", [-1, 256, True, "0", 0.0, None])
def test_what_is_no_number_of_a_device_is_refused(workers, number):
    with pytest.raises(SophgoCallError, match="not a device number"):
        device.open_device(number)
    assert workers[1] == []
