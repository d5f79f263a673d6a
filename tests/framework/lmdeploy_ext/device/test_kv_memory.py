"""The size of the KV cache on a CPU: what was chosen, what fits, what can ever be used."""

import pytest

from dlinfer.framework.lmdeploy_ext.device.kv_memory import (
    LMDEPLOY_DEFAULT_FRACTION,
    gib,
    plan_blocks,
)

GIB = 1 << 30
BLOCK = 1 << 20


def plan(**changes):
    arguments = {
        "free": 16 * GIB,
        "block_bytes": BLOCK,
        "fraction": LMDEPLOY_DEFAULT_FRACTION,
        "default_bytes": 4 * GIB,
        "useful_blocks": None,
    }
    return plan_blocks(**{**arguments, **changes})


def test_the_default_is_a_fixed_budget_not_a_share_of_the_host():
    assert plan() == 4 * GIB // BLOCK
    assert plan(free=1000 * GIB) == 4 * GIB // BLOCK


def test_the_default_never_takes_more_than_half_of_what_is_free():
    assert plan(free=2 * GIB) == 1 * GIB // BLOCK


@pytest.mark.parametrize("fraction", [0.1, 0.4, 0.9])
def test_a_chosen_fraction_is_taken_as_on_a_card(fraction):
    assert plan(fraction=fraction) == int(16 * GIB * fraction // BLOCK)


def test_no_more_blocks_than_all_sequences_can_fill():
    assert plan(useful_blocks=100) == 100
    assert plan(fraction=0.9, useful_blocks=100) == 100


def test_sizes_are_printed_for_people():
    assert gib(4 * GIB) == "4.00 GiB"
    assert gib(3 << 20) == "3.00 MiB"
