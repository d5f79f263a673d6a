"""Latent attention by flash_mla: both versions of its declaration, schedules, graphs, and what is declined by name.

Numbers of all sizes are compared in checks_sizes.py, and here once more on the later version.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dlinfer import ops, settings
from dlinfer.errors import FallbackError
from dlinfer.vendor.maca import latent, sdk
from tests.ops import cases
from tests.vendor import simulated_graph
from tests.vendor.ascend.real_sizes import latent as decode_arguments
from tests.vendor.ascend.real_sizes import latent_paged_prompt, latent_prompt
from tests.vendor.maca import real_sizes, tolerances
from tests.vendor.maca.checks_sizes import halves, maker, native
from tests.vendor.maca.simulated_card import later_latent
from tests.vendor.maca.simulated_card.calling import calls
from tests.vendor.maca.simulated_card.install import NAME

DECODE, PROMPTS, PAGED = real_sizes.LATENT_DECODE, real_sizes.LATENT_PROMPTS, real_sizes.LATENT_PAGED_PROMPTS
VERSIONS = ("1.0.1", "later")


@pytest.fixture(autouse=True)
def _no_schedules():
    """None that another test has made."""
    latent._scheduled.cache_clear()
    yield
    latent._scheduled.cache_clear()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "later")


def use(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    if version == "later":
        package: ModuleType = later_latent
        monkeypatch.setitem(sys.modules, "flash_mla", package)
        monkeypatch.setattr(sdk, "flash_mla", lambda: package)


@halves
@pytest.mark.parametrize(
    "call",
    [one for one in real_sizes.latent_calls() if one.op != "fill_kv_cache"],
    ids=lambda call: f"{call.op}-{call.name}",
)
def test_real_sizes_on_the_later_version(later, call, dtype):
    native(ops.registry()[call.op], call.arguments(maker(dtype)), dtype)
    assert (
        bool(calls["dense_decode_fwd"]) is ("without keys" not in call.name) and not calls["fwd_kvcache_mla"]
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_the_result_may_lie_in_the_queries(monkeypatch, version):
    use(monkeypatch, version)
    for op, made, case in (
        ("paged_decode_attention", decode_arguments, DECODE[0]),
        ("prefill_attention", latent_prompt, PROMPTS[0]),
        ("paged_prefill_attention", latent_paged_prompt, PAGED[1]),
    ):
        args = list(made(maker(torch.float16), replace(case, aliased=True)))
        place = ops.registry()[op].parameters.index("attn_output")
        args[place] = args[0][..., : latent.VALUES]
        native(ops.registry()[op], tuple(args), torch.float16)


# --- the cache


def test_a_slot_begins_with_the_value_and_ends_as_the_key():
    make = maker(torch.bfloat16)
    k, v, cache = make.tensor(3, 1, 576), make.tensor(3, 1, 512), make.tensor(2, 64, 1, 576)
    before = cache.cpu().clone()
    slots = torch.tensor([70, -1, 3], device=NAME)
    with settings.override(fallback="error"):
        ops.fill_kv_cache(k, v, cache, cache[..., :512], slots)
    rows = torch.cat((v, k[..., 512:]), -1).cpu()
    after = cache.cpu().view(-1, 1, 576)
    assert torch.equal(after[70], rows[0]) and torch.equal(after[3], rows[2])
    untouched = [slot for slot in range(128) if slot not in (70, 3)]
    assert torch.equal(after[untouched], before.view(-1, 1, 576)[untouched])
    assert calls["concat_and_cache_mla"] == 1


# --- schedules


@pytest.mark.parametrize("version", VERSIONS)
def test_a_schedule_is_one_a_step(monkeypatch, version):
    use(monkeypatch, version)
    made = counted(monkeypatch)
    for lengths in ((130, 1, 256), (131, 2, 257)):
        case = replace(DECODE[0], q_lens=(1,) * 3, kv_lens=lengths)
        for _ in range(3):  # layers
            native(ops.paged_decode_attention, decode_arguments(maker(torch.float16), case), torch.float16)
    assert made == [16, 16]
    for _ in range(3):
        native(
            ops.paged_prefill_attention, latent_paged_prompt(maker(torch.float16), PAGED[1]), torch.float16
        )
    # 260 queries are two pieces of 128 in one call, and one of 4; 5 are a piece: each times 2 heads
    assert made[2:] == [256, 8, 10]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries a head of keys of each schedule that is asked for from now on."""
    made: list[int] = []
    real = sdk.flash_mla().get_mla_metadata

    def count(lengths: Tensor, queries: int, heads: int) -> Any:
        made.append(queries)
        return real(lengths, queries, heads)

    monkeypatch.setattr(sdk.flash_mla(), "get_mla_metadata", count)
    return made


def test_a_schedule_for_other_lengths_is_seen(later, monkeypatch):
    """Planted: one for all steps of a batch's size."""
    plain = latent._scheduled.__wrapped__
    kept: dict[int, Any] = {}

    def scheduled(lengths: tuple[int, ...], *how: Any) -> tuple[Tensor, Any]:
        on_card, schedule = plain(lengths, *how)
        return on_card, kept.setdefault(len(lengths), schedule)

    scheduled.cache_clear = kept.clear  # type: ignore[attr-defined]
    monkeypatch.setattr(latent, "_scheduled", scheduled)
    short = replace(DECODE[0], kv_lens=(1,) * 5)
    native(ops.paged_decode_attention, decode_arguments(maker(torch.float16), short), torch.float16)
    with pytest.raises(AssertionError, match="are wrong"):
        native(ops.paged_decode_attention, decode_arguments(maker(torch.float16), DECODE[0]), torch.float16)


# --- graphs


class Steps:
    """Two layers of a decoding step whose lengths lie on the card, as in a graph's buffers."""

    def __init__(self) -> None:
        make = maker(torch.float16)
        case = replace(DECODE[0], q_lens=(1, 1), kv_lens=(256, 256))
        args = decode_arguments(make, case)
        self.q, self.keys, self.table = args[0], args[1], args[3]
        self.lengths = torch.zeros(2, dtype=torch.int32, device=NAME)

    def layers(self, lengths: Tensor) -> list[Tensor]:
        with settings.override(fallback="error"):
            return [
                ops.paged_decode_attention(
                    q, self.keys, self.keys[..., :512], self.table, 64, lengths, lengths, 256, 16, 1, softmax_scale=0.05
                )
                for q in (self.q, self.q * 2)
            ]  # fmt: skip

    def differs(self) -> bool:
        """Whether replays give what eager steps give."""
        self.lengths.copy_(torch.tensor([65, 3], dtype=torch.int32))
        self.layers(self.lengths)  # before the capture, as capture.runner does
        graph = simulated_graph.Graph()
        graph.capture_begin()
        try:
            held = self.layers(self.lengths)
        finally:
            graph.capture_end()
        for pair in ([65, 3], [256, 130], [1, 0]):
            self.lengths.copy_(torch.tensor(pair, dtype=torch.int32))
            graph.replay()
            want = self.layers(torch.tensor(pair))
            if not all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(held, want, strict=True)):
                return True
        return False


@pytest.mark.parametrize("version", VERSIONS)
def test_replays_follow_the_lengths(monkeypatch, version):
    use(monkeypatch, version)
    assert not Steps().differs()


def test_a_schedule_from_before_the_capture_is_seen(later, monkeypatch):
    """Planted: kept for a tensor of lengths, whose numbers a replay finds changed."""
    real = later_latent.get_mla_metadata
    kept = lru_cache(lambda place, *how: real())
    monkeypatch.setattr(
        later_latent, "get_mla_metadata", lambda lengths, *how: kept(lengths.data_ptr(), len(lengths), *how)
    )
    assert Steps().differs()


# --- what is declined


def spoilt(op: str, made: Callable, case: Any, change: Callable[[dict[str, Any]], Any]) -> tuple:
    given = dict(zip(ops.registry()[op].parameters, made(maker(torch.float16), case), strict=True))
    change(given)
    return op, tuple(given.values())


def decoding(**change: Any) -> Callable[[], tuple]:
    return lambda: spoilt(
        "paged_decode_attention", decode_arguments, DECODE[2], lambda one: one.update(change)
    )


def apart(given: dict[str, Any]) -> None:
    given["v_cache"] = given["v_cache"].clone()


def of_pages(size: int) -> Callable[[], tuple]:
    case = replace(DECODE[2], block_size=size)
    return lambda: spoilt("paged_decode_attention", decode_arguments, case, lambda one: None)


def with_gaps(given: dict[str, Any]) -> None:
    keys = given["k_cache"]
    wide = torch.cat((keys, keys[..., :1]), -1)
    given["k_cache"], given["v_cache"] = wide[..., :576], wide[..., :512]


def other_values(given: dict[str, Any]) -> None:
    given["v"] = given["v"] + 1


DECLINED = {
    "a window": (decoding(window_left=5), "does not support a window"),
    "soft-cap": (decoding(logit_softcapping=2.0), "logit_softcapping"),
    "alibi": (decoding(alibi_slopes=torch.ones(2, device=NAME)), "does not support alibi_slopes"),
    "sinks": (decoding(sinks=torch.ones(2, device=NAME).half()), "or sinks"),
    "pages of 32": (of_pages(32), "64 slots, not 32"),
    "values elsewhere": (
        lambda: spoilt("paged_decode_attention", decode_arguments, DECODE[2], apart),
        "v_cache is other memory",
    ),
    "slots with gaps": (
        lambda: spoilt("paged_decode_attention", decode_arguments, DECODE[2], with_gaps),
        "are not contiguous",
    ),
    "other values than the keys'": (
        lambda: spoilt("prefill_attention", latent_prompt, PROMPTS[2], other_values),
        "v is not the first part of k",
    ),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_declined(what):
    made, says = DECLINED[what]
    op, args = made()
    with settings.override(fallback="error"), pytest.raises(FallbackError, match=says):
        ops.registry()[op].overload(*args)
    assert not calls["fwd_kvcache_mla"]
    # and the reference answers it
    with settings.override(fallback="allow"):
        returned = ops.registry()[op].overload(*args)
    host = tuple(one.cpu() if isinstance(one, Tensor) else one for one in args)
    found = [one.cpu() for one in cases.results(ops.registry()[op], args, returned)]
    want = cases.expected(ops.registry()[op], host)
    cases.assert_close(found, want, tolerances.of(ops.registry()[op], torch.float16))


def test_float32_is_declined():
    args = decode_arguments(maker(torch.float32), DECODE[2])
    with (
        settings.override(fallback="error"),
        pytest.raises(FallbackError, match="float16, bfloat16 are supported"),
    ):
        ops.paged_decode_attention.overload(*args)


def test_a_container_without_flash_mla(monkeypatch):
    monkeypatch.setattr(sdk, "has_flash_mla", lambda: False)
    args = decode_arguments(maker(torch.float16), DECODE[2])
    with settings.override(fallback="error"), pytest.raises(FallbackError, match="not installed"):
        ops.paged_decode_attention.overload(*args)


def test_other_latent_sizes_are_declined():
    case = replace(DECODE[2], sizes=(528, 528))
    q, keys, _, *rest = decode_arguments(maker(torch.float16), case)
    args = q[..., :528].contiguous(), keys, keys[..., :512], *rest
    with settings.override(fallback="error"), pytest.raises(FallbackError, match="those of a latent cache"):
        ops.paged_decode_attention.overload(*args)
