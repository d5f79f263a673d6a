"""Decoding has a turn between any two chunks of a prompt."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmdeploy")

from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.pytorch.engine.inputs_maker import _ForwardInputsState, _ForwardInputsTask

from dlinfer.framework.lmdeploy_ext.device import activation


def task(
    *, last_forward: str, last_chunk: bool, running: int = 1, role=EngineRole.Hybrid, prefill: bool = True
):
    made: Any = object.__new__(_ForwardInputsTask)
    chunker = SimpleNamespace(enabled=lambda: True, is_last_chunk=lambda: last_chunk)
    made.maker = SimpleNamespace(
        config=SimpleNamespace(role=role),
        long_context_chunker=chunker,
        running_seqs=[object()] * running,
        _last_forward_kind=last_forward,
    )
    made.state = _ForwardInputsState(prefill=prefill)
    return made


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_active", "cpu")


@pytest.mark.usefixtures("on_cpu")
class TestOnOurDevice:
    @pytest.mark.parametrize("last_chunk", [False, True])
    @pytest.mark.parametrize("last", ["long_context_chunk", "prefill"])
    def test_a_chunk_after_prompts_waits_for_decoding(self, last, last_chunk):
        assert task(last_forward=last, last_chunk=last_chunk)._should_defer_active_chunk()

    @pytest.mark.parametrize("last_chunk", [False, True])
    def test_a_chunk_after_a_decoding_step_waits_no_more(self, last_chunk):
        assert not task(last_forward="decode", last_chunk=last_chunk)._should_defer_active_chunk()

    def test_the_last_chunk_waits_for_nobody_where_nobody_decodes(self):
        alone = task(last_forward="long_context_chunk", last_chunk=True, running=0)
        assert not alone._should_defer_active_chunk()

    def test_an_engine_that_only_prefills_waits_for_nobody(self):
        engine = task(last_forward="long_context_chunk", last_chunk=True, role=EngineRole.Prefill)
        assert not engine._should_defer_active_chunk()


def test_other_devices_keep_the_order_of_lmdeploy(monkeypatch):
    monkeypatch.setattr(activation, "_active", None)
    assert not task(last_forward="long_context_chunk", last_chunk=True)._should_defer_active_chunk()
