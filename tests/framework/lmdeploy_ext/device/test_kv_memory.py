"""The size of the KV cache on a CPU: the option that decides it, what fits, and what running sequences can fill."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.cli.utils import ArgumentHelper, FlexibleArgumentParser
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.kv_memory import gib, plan_blocks
from dlinfer.vendor.device import DeviceMemory

GIB = 1 << 30
BLOCK = 1 << 20


@pytest.fixture
def memory(monkeypatch):
    """Set whether the device shares its memory."""

    def share(shared):
        device = SimpleNamespace(memory=lambda: DeviceMemory(0, 0, "a test", shared=shared))
        monkeypatch.setattr(activation, "device", lambda: device)

    share(True)
    return share


def plan(free=12 * GIB, **options):
    config = PytorchEngineConfig(device_type="cpu", **options)
    return plan_blocks(ConfigBuilder.build_cache_config(config), free, BLOCK)


@pytest.mark.parametrize(("free", "taken"), [(2, 1), (6, 3), (12, 4), (16, 4), (64, 16), (1000, 250)])
def test_the_default_grows_with_free_memory(memory, free, taken):
    assert plan(free=free * GIB) == taken * GIB // BLOCK


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.79, 0.8, 0.9])
def test_a_fraction_that_the_user_gives_is_taken_as_on_a_card(memory, fraction):
    assert plan(cache_max_entry_count=fraction) == int(12 * GIB * fraction) // BLOCK


def test_the_setting_decides_if_no_fraction_is_given(memory):
    with settings.override(cpu_kv_cache_gib=9.5):
        assert plan() == 9.5 * GIB // BLOCK
        assert plan(cache_max_entry_count=0.25) == 3 * GIB // BLOCK
        memory(False)
        assert plan() == int(12 * GIB * 0.8) // BLOCK


def test_a_device_s_own_memory_is_taken_as_on_a_card(memory):
    memory(False)
    assert plan() == int(12 * GIB * 0.8) // BLOCK


def test_a_default_cache_holds_no_more_than_running_sequences_fill(memory):
    sizes = {"session_len": 640, "max_batch_size": 4, "block_size": 64}
    assert plan(**sizes) == 4 * (10 + 2) + 1  # which LMDeploy reserves
    assert plan(**sizes, enable_prefix_caching=True) == 4 * GIB // BLOCK
    assert plan(**sizes, cache_max_entry_count=0.5) == 6 * GIB // BLOCK
    with settings.override(cpu_kv_cache_gib=1.0):
        assert plan(**sizes) == GIB // BLOCK


def test_a_number_of_blocks_is_used_unchanged(memory):
    assert plan(num_gpu_blocks=77, cache_max_entry_count=0.5) == 77


def command_line(*arguments: str) -> dict[str, Any]:
    parser = FlexibleArgumentParser()
    ArgumentHelper.cache_max_entry_count(parser)
    ArgumentHelper.max_prefill_token_num(parser)
    return vars(parser.parse_args(arguments))


def test_the_command_line_tells_a_typed_fraction_from_its_default(memory):
    assert plan(**command_line()) == 4 * GIB // BLOCK
    assert plan(**command_line("--cache-max-entry-count", "0.8")) == int(12 * GIB * 0.8) // BLOCK


def test_the_command_line_tells_a_typed_prefill_from_its_default():
    chosen = PytorchEngineConfig(device_type="cpu", **command_line()).max_prefill_token_num
    typed = PytorchEngineConfig(device_type="cpu", **command_line("--max-prefill-token-num", "8192"))
    assert chosen == 1024 and typed.max_prefill_token_num == 8192


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_of_a_config_remember_what_the_user_gave(memory, copied):
    left_out = copied(PytorchEngineConfig(device_type="cpu"))
    given = copied(PytorchEngineConfig(device_type="cpu", cache_max_entry_count=0.8))
    for config, blocks in ((left_out, 4 * GIB // BLOCK), (given, int(12 * GIB * 0.8) // BLOCK)):
        assert plan_blocks(ConfigBuilder.build_cache_config(config), 12 * GIB, BLOCK) == blocks


def test_sizes_are_printed_for_people():
    assert gib(4 * GIB) == "4.00 GiB"
    assert gib(3 << 20) == "3.00 MiB"
