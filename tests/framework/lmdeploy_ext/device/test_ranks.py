"""Models on several devices: what is refused by name, and that a rank goes on while it waits for the others."""

import asyncio
import multiprocessing
import threading
import time
from types import SimpleNamespace

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.config import DistConfig
from lmdeploy.pytorch.engine.executor.mp_executor import NUM_SHARED_BLOCK, Notifier

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.model import config, tensor_parallel
from dlinfer.framework.lmdeploy_ext.device import ranks
from examples.tiny_models.families import FAMILIES


@pytest.fixture
def served(monkeypatch):
    """As if the CPU's vendor said that a model may lie on several."""
    monkeypatch.setattr(ranks, "are_served", lambda device_type: True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "tp=2 in graph mode"),
        ({"eager_mode": True, "adapters": {"one": "folder"}}, "tp=2 with adapters"),
        ({"eager_mode": True, "distributed_executor_backend": "ray"}, "distributed_executor_backend='ray'"),
    ],
)
def test_options_that_were_not_compared(options, named, served):
    with pytest.raises(UnsupportedFeatureError, match=named):
        PytorchEngineConfig(device_type="cpu", tp=2, **options)


@pytest.mark.parametrize("backend", [None, "mp"])
def test_two_eager_ranks_are_served(backend, served):
    config = PytorchEngineConfig(
        device_type="cpu", tp=2, eager_mode=True, distributed_executor_backend=backend
    )
    assert config.tp == 2


def test_one_rank_needs_no_processes():
    with pytest.raises(UnsupportedFeatureError, match="distributed_executor_backend='mp'"):
        PytorchEngineConfig(device_type="cpu", distributed_executor_backend="mp")


@pytest.mark.parametrize(
    ("config", "method", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, None, "tp=2 of GemmaForCausalLM"),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}},
            None,
            "quantised",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "eagle", "speculative"),
    ],
)
def test_models_that_were_not_compared(config, method, named):
    with pytest.raises(UnsupportedFeatureError, match=named):
        tensor_parallel.check_model(config, 2, method)
    tensor_parallel.check_model(config, 1, method)


def test_the_families_of_the_matrix_are_served():
    assert len(tensor_parallel.COMPARED) == len(FAMILIES)
    for name in tensor_parallel.COMPARED:
        tensor_parallel.check_model({"architectures": [name]}, 2, None)


def test_ranks_are_found_where_lmdeploy_gives_them():
    PytorchEngineConfig(device_type="cpu")
    read = config.from_hf_config.build(lambda *_: pytest.fail("it was let through"))
    gemma = SimpleNamespace(model_type="gemma", to_dict=lambda: {"architectures": ["GemmaForCausalLM"]})
    for args, kwargs in (
        (("path", "auto", DistConfig(tp=2)), {}),
        (("path",), {"dist_config": DistConfig(tp=2), "device_type": "cpu"}),
    ):
        with pytest.raises(UnsupportedFeatureError, match="tp=2"):
            read(None, gemma, *args, **kwargs)


def test_a_rank_computes_while_it_waits_for_the_others():
    """At every 32nd message; LMDeploy's own wait holds the event loop, in which the step of the model would run."""
    PytorchEngineConfig(device_type="cpu")
    notifier = Notifier(1, multiprocessing.get_context("spawn"))
    notifier._event_id = NUM_SHARED_BLOCK - 1
    notifier.events[-1].set()
    stepped = threading.Event()

    def other() -> None:
        assert stepped.wait(60), "the loop was held"
        notifier.bar.wait()
        notifier.bar.wait()

    async def receive() -> None:
        async with notifier.wait_async():
            pass

    async def both() -> None:
        waiting = asyncio.create_task(receive())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        stepped.set()
        await waiting

    thread = threading.Thread(target=other)
    thread.start()
    start = time.monotonic()
    asyncio.run(both())
    thread.join()
    assert notifier._event_id == 0 and time.monotonic() - start < 60
