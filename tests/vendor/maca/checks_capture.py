"""Graphs over buffers, on the strict stand-in of a graph: what is maca's own."""

import pytest
import torch
from torch import Tensor

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.errors import CapturedStepError
from dlinfer.vendor.maca.device import MacaDevice
from tests.vendor.captured_steps import (
    BLOCK,
    BLOCKS,
    HEADS,
    SIZE,
    CapturedSteps,
    with_lengths_of_the_host,
)
from tests.vendor.maca.simulated_card.install import NAME


class TestCapturedSteps(CapturedSteps):
    name, device = NAME, MacaDevice
    shape = (BLOCKS, BLOCK, HEADS, SIZE)

    def test_a_kernel_that_reads_lengths_is_seen(self, runner, monkeypatch):
        """Inside an op of ours, too."""

        def reads(lengths: Tensor, device: torch.device) -> Tensor:
            return torch.tensor(lengths.tolist(), dtype=torch.int32, device=device)

        monkeypatch.setattr("dlinfer.vendor.maca.sequences.of_sequences", reads)
        raises = pytest.raises(CapturedStepError, match=r"paged_decode_attention.*waits for the host")
        with settings.override(fallback="error"), raises:
            runner(**self.step([5], self.caches()))

    def test_lengths_of_the_host_in_a_graph_are_seen(self, runner, monkeypatch):
        with_lengths_of_the_host(monkeypatch)
        assert self.differs(runner)
