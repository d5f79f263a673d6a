"""Graphs over buffers, on the strict stand-in of a graph: what is camb's own."""

from types import SimpleNamespace

import pytest

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.errors import CapturedStepError
from dlinfer.vendor.camb.device import CambDevice
from tests.vendor.camb.simulated_mlu.install import NAME
from tests.vendor.captured_steps import (
    BLOCK,
    BLOCKS,
    HEADS,
    SIZE,
    CapturedSteps,
    with_lengths_of_the_host,
)


class TestCapturedSteps(CapturedSteps):
    name, device = NAME, CambDevice
    shape = (BLOCKS, HEADS, BLOCK, SIZE)

    def test_a_kernel_that_reads_lengths_is_seen(self, runner, monkeypatch):
        """Inside an op of ours, too: what it does for steps that nobody captures."""
        monkeypatch.setattr(
            "dlinfer.vendor.camb.attention.decode.cards",
            lambda: SimpleNamespace(is_current_stream_capturing=bool),
        )
        raises = pytest.raises(CapturedStepError, match=r"paged_decode_attention.*waits for the host")
        with settings.override(fallback="error"), raises:
            runner(**self.step([5], self.caches()))

    def test_lengths_of_the_host_in_a_graph_are_seen(self, runner, monkeypatch):
        with_lengths_of_the_host(monkeypatch)
        with (
            settings.override(fallback="error"),
            pytest.raises(CapturedStepError, match="waits for the host"),
        ):
            runner(**self.step([5], self.caches()))

    def test_padding_without_a_length_is_refused(self, monkeypatch):
        """As on other cards: the documents have no length of 0, which a replay meets first."""
        monkeypatch.setattr(CambDevice, "padding_length", 0)
        runner = self.build()
        runner(**self.step([5, 6, 7, 8], self.caches()))
        with pytest.raises(RuntimeError, match="of 0 nothing is said"):
            self.differs(runner, [[5, 6, 7, 8], [5, 6, 7]])
