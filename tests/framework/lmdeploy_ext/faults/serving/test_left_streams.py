"""A stream whose reader has left, in the engine's process."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.engine.mp_engine.base_worker import StreamMailbox
from lmdeploy.pytorch.engine.mp_engine.zmq_rpc import AsyncRPCServer


def test_publishing_to_nobody_ends_the_stream_quietly(caplog: pytest.LogCaptureFixture):
    """LMDeploy 0.18 itself logs "Cannot publish output after stream completion" with a traceback."""
    PytorchEngineConfig(device_type="cpu")
    server: Any = object.__new__(AsyncRPCServer)
    server.stream_output = {}
    server._engine_output_gather = SimpleNamespace(add=lambda *_: None)
    server.send_multipart = lambda *_: None
    closed = []

    async def endless():
        try:
            while True:
                yield None
                server.stream_output[1].finish()  # the reader has left, and nobody could cancel this task
        finally:
            closed.append(True)

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await server._method_async_streaming_task(1, 1, b"", endless, (), {})

    with caplog.at_level(logging.ERROR, logger="lmdeploy"):
        asyncio.run(run())
    assert not caplog.records
    assert closed


def test_elsewhere_it_is_an_error_as_before(monkeypatch: pytest.MonkeyPatch):
    from dlinfer.framework.lmdeploy_ext.device import activation

    monkeypatch.setattr(activation, "_active", None)
    mailbox = StreamMailbox()
    mailbox.finish()
    with pytest.raises(RuntimeError, match="after stream completion"):
        mailbox.publish(None)
