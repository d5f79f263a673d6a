"""Attention over the paged KV cache inside OpenVINO, on torch's own memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlinfer import ops
from dlinfer.errors import GraphFallbackError, OpArgumentError
from dlinfer.graph.bound_call.capture import capture_call
from dlinfer.graph.options import CompileOptions
from dlinfer.ops.attention.semantics import Scoring, attend
from dlinfer.vendor import discovery
from dlinfer.vendor.openvino.devices import has_bfloat16
from dlinfer.vendor.openvino.options import OpenVINOOptions
from tests.vendor.openvino.lowering import lowered

BLOCK, HEADS, KV_HEADS, SIZE = 32, 4, 2, 16


@contextmanager
def openvino_active() -> Iterator[None]:
    before = discovery.activate_default("cpu")
    assert before is not None
    discovery.use("openvino")
    try:
        yield
    finally:
        discovery.use(before.name)


@pytest.fixture(autouse=True)
def vendor():
    """The openvino vendor lays out the caches."""
    with openvino_active():
        yield


class Step:
    """New tokens of sequences, ``new`` of each after ``old``, over caches that are full of other numbers."""

    def __init__(
        self,
        new: list[int],
        old: list[int],
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (HEADS, KV_HEADS),
        sizes: tuple[int, int] = (SIZE, SIZE),
        fill: float | None = None,
    ) -> None:
        torch.manual_seed(len(new) + sum(old))
        self.new, self.old = new, old
        self.total = [a + b for a, b in zip(new, old, strict=True)]
        width = -(-max(self.total) // BLOCK) + 2
        blocks = len(new) * width + 3
        self.table = torch.randperm(blocks)[: len(new) * width].view(len(new), width)
        for row, total in zip(self.table, self.total, strict=True):
            row[-(-total // BLOCK) :] = 2**30  # nobody may look there
        self.caches = [torch.randn(blocks, heads[1], BLOCK, size, dtype=dtype) for size in sizes]
        if fill is not None:
            for cache in self.caches:
                cache.fill_(fill)
        self.slots = torch.tensor([self._slot(b, p) for b in range(len(new)) for p in self._positions(b)])
        self.q = torch.randn(sum(new), heads[0], sizes[0], dtype=dtype)
        self.k, self.v = (torch.randn(sum(new), heads[1], size, dtype=dtype) for size in sizes)

    def _positions(self, b: int) -> range:
        return range(self.old[b], self.total[b])

    def _slot(self, b: int, position: int) -> int:
        return int(self.table[b, position // BLOCK]) * BLOCK + position % BLOCK

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, both caches, slots, table, where queries end, lengths."""
        numbers = (self.slots, self.table, torch.tensor(self.new).cumsum(0), torch.tensor(self.total))
        return (self.q, self.k, self.v, *self.caches, *numbers)

    def cached(self, cache: torch.Tensor, b: int) -> torch.Tensor:
        """What a cache holds of a sequence: [tokens, heads, size]."""
        blocks = self.table[b, : -(-self.total[b] // BLOCK)]
        return cache[blocks].transpose(1, 2).flatten(0, 1)[: self.total[b]]

    def expected(self, **options: Any) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """The result in float64, and what both caches then hold of each sequence."""
        scoring = Scoring(**{"softmax_scale": self.q.shape[2] ** -0.5} | options)
        held = [[self.cached(cache, b).clone() for b in range(len(self.new))] for cache in self.caches]
        out, start = [], 0
        for b, count in enumerate(self.new):
            for one, new in zip(held, (self.k, self.v), strict=True):
                one[b][self.old[b] :] = new[start : start + count]
            q, k, v = self.q[start : start + count].double(), held[0][b].double(), held[1][b].double()
            out.append(attend(q, k, v, scoring))
            start += count
        return torch.cat(out), held


def prefill(q, k, v, k_cache, v_cache, slots, table, ends, lengths, **options):
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    heads = (q.shape[0], 1, q.shape[1], k.shape[1])  # the longest are bounds that nobody needs
    return ops.paged_prefill_attention(
        q, k, v, k_cache, v_cache, table, BLOCK, ends, lengths, *heads, **options
    )


def decode(q, k, v, k_cache, v_cache, slots, table, ends, lengths, **options):
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    heads = (q.shape[1], k.shape[1])
    return ops.paged_decode_attention(q, k_cache, v_cache, table, BLOCK, ends, lengths, 1, *heads, **options)


def check(run: Any, step: Step, tolerance: float = 2e-5, **options: Any) -> None:
    """Result and caches, which must be the memory that was given. float32: sums of at most 256 terms."""
    want, held = step.expected(**options)
    (got,) = run(*step.args)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for cache, sequences in zip(step.caches, held, strict=True):
        for b, kept in enumerate(sequences):
            assert torch.equal(step.cached(cache, b), kept)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Each function once, for all sizes; those of the example differ, since equal ones are taken to stay equal."""
    old = [2, 7, 4, 0, 9]
    with (
        openvino_active()
    ):  # made before any test's own fixture, whose end must find the vendor that was there before
        return {
            "prefill": lowered(prefill, *Step([3, 5, 1, 8, 6], old).args)[0],
            "decode": lowered(decode, *Step([1] * 5, old).args)[0],
        }


LENGTHS = st.lists(st.tuples(st.integers(1, 70), st.integers(0, 130)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=12)
@given(LENGTHS)
def test_any_step(compiled, lengths):
    """One model for prompts with and without a cached beginning, for decoding, and for both at once."""
    new, old = map(list, zip(*lengths, strict=True))
    check(compiled["prefill"], Step(new, old))
    check(compiled["prefill"], Step([1] * len(old), old))
    check(compiled["decode"], Step([1] * len(old), old))


SHAPES = {
    "one head": ((1, 1), (16, 16)),
    "a key head for each query head": ((3, 3), (8, 8)),
    "one key head": ((8, 1), (64, 64)),
    "heads of Qwen2.5-0.5B": ((14, 2), (64, 64)),
    "large heads": ((2, 1), (256, 256)),
    "smaller values": ((4, 2), (24, 16)),
    "larger values": ((4, 2), (16, 24)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_heads_and_sizes(name):
    heads, sizes = SHAPES[name]
    step = Step([3, 1, 40], [40, 0, 31], heads=heads, sizes=sizes)
    check(lowered(prefill, *step.args)[0], step)


SLOPES, SINKS = (
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({"softmax_scale": 0.5}, {"softmax_scale": 0.5}),
    "window of one": ({"sliding_window": (0, 0)}, {"window_left": 0}),
    "window": ({"sliding_window": 9}, {"window_left": 9}),
    "window longer than all": ({"sliding_window": 500}, {"window_left": 500}),
    "slopes": (SLOPES, SLOPES),
    "sinks": (SINKS, SINKS),
}


@pytest.mark.parametrize("function", [prefill, decode])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(function, name):
    given, expected = OPTIONS[name]
    new = [1, 1, 1] if function is decode else [3, 1, 40]
    step = Step(new, [40, 0, 31])

    def run(*args: Any) -> Any:
        return function(*args, **given)

    check(lowered(run, *step.args)[0], step, **expected)


def test_half_precision():
    """Keys and values stay in float16 in the cache, whatever the CPU computes in: results are rounded once."""
    step = Step([3, 1, 40], [40, 0, 31], torch.float16)
    check(lowered(prefill, *step.args)[0], step, tolerance=2e-3)


def test_bfloat16_where_the_cpu_has_it():
    step = Step([3, 1, 40], [40, 0, 31], torch.bfloat16)
    if has_bfloat16():
        check(lowered(prefill, *step.args)[0], step, tolerance=2e-2)
        return
    with pytest.raises(GraphFallbackError, match=r"this CPU has no bfloat16.*cannot stay in bfloat16"):
        lowered(prefill, *step.args)


def test_what_nobody_wrote_is_not_read(compiled):
    """A cache may hold anything where no token is: NaN too."""
    check(compiled["prefill"], Step([3, 33], [0, 0], fill=float("nan")))
    check(compiled["decode"], Step([1, 1], [0, 0], fill=float("nan")))


def two_layers(q, k, v, k_cache, v_cache, slots, table, ends, lengths, k_cache_2, v_cache_2):
    out = prefill(q, k, v, k_cache, v_cache, slots, table, ends, lengths)
    return prefill(out, k, v, k_cache_2, v_cache_2, slots, table, ends, lengths)


def test_layers_find_their_blocks_together():
    step, second = Step([3, 5], [2, 7]), Step([3, 5], [2, 7])
    run, report = lowered(two_layers, *step.args, *second.caches)
    region: Any = run.regions["region_0"]
    template = region.lowered.template
    names = [node.get_type_name() for node in template.model.get_ops()]
    assert names.count("PagedAttentionExtension") == 2
    assert names.count("Range") == 1
    first, _ = step.expected()
    (got,) = run(*step.args, *second.caches)
    second.q = first.float()
    torch.testing.assert_close(got.double(), second.expected()[0], rtol=2e-5, atol=2e-5)
    assert [node.op for node in report.placed("engine")].count("dlinfer_graph.cached_attention") == 2


def test_a_cache_is_never_copied(compiled):
    """What two caches of 96 MB need besides themselves is less than a copy of one."""
    step = Step([1, 1, 1], [2, 7, 4])
    step.caches = [torch.zeros(24_000, KV_HEADS, BLOCK, SIZE) for _ in range(2)]
    compiled["decode"](*step.args)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew at what is resident now
    before = _kilobytes("VmRSS")
    check(compiled["decode"], step)
    assert _kilobytes("VmHWM") - before < step.caches[0].nbytes / 1024 / 2


def _kilobytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


def test_a_region_lets_go_of_its_weights_and_works_again():
    """What LMDeploy asks for when it sleeps or ends."""

    class Projected(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(SIZE, SIZE)

        def forward(self, q, k, v, k_cache, v_cache, slots, table, ends, lengths):
            return self.linear(prefill(q, k, v, k_cache, v_cache, slots, table, ends, lengths))

    step, module = Step([3, 5], [2, 7]), Projected().requires_grad_(False)
    names = ("q", "k", "v", "k_cache", "v_cache", "slots", "table", "ends", "lengths")
    kwargs: dict[str, Any] = dict(zip(names, step.args, strict=True))
    options = CompileOptions(engine="openvino", fallback="error")
    call, want = capture_call(module, kwargs, steady=names, options=options)
    (run,) = call.program.regions.values()
    region: Any = run
    assert region.nbytes == (SIZE + 1) * SIZE * 4
    call.unbind()
    assert region.nbytes == 0
    torch.testing.assert_close(call(**kwargs), want)


def test_slots_elsewhere_are_an_error_before_anything_is_written(compiled):
    step = Step([3, 5], [2, 7])
    before = [cache.clone() for cache in step.caches]
    args = list(step.args)
    args[5] = step.slots.flip(0)
    with pytest.raises(OpArgumentError, match="kv_start_indices"):
        compiled["prefill"](*args)
    assert all(map(torch.equal, step.caches, before))


# --- what is not taken


def test_a_cache_that_is_not_contiguous_runs_by_torch():
    """OpenVINO would write into a copy of it."""
    step = Step([3, 5], [2, 7])
    run, _ = lowered(prefill, *step.args, fallback="allow")
    step.caches[0] = step.caches[0].transpose(1, 2).contiguous().transpose(1, 2)
    check(run, step)
    strict, _ = lowered(prefill, *step.args)
    with pytest.raises(GraphFallbackError, match="not contiguous"):
        strict(*step.args)


def test_other_block_sizes_are_refused():
    args = list(Step([3], [0]).args)
    args[3:5] = [cache[:, :, :16].contiguous() for cache in args[3:5]]

    def blocks_of_16(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
        ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
        numbers = (16, ends, lengths, 1, 1, HEADS, KV_HEADS)
        return ops.paged_prefill_attention(q, k, v, k_cache, v_cache, table, *numbers)

    with pytest.raises(GraphFallbackError, match="blocks have 16 slots, but OpenVINO's attention takes 32"):
        lowered(blocks_of_16, *args)


def test_a_soft_cap_is_refused():
    def capped(*args: Any) -> Any:
        return prefill(*args, logit_softcapping=5.0)

    with pytest.raises(GraphFallbackError, match="does not support a soft cap"):
        lowered(capped, *Step([3], [0]).args)


def test_caches_of_another_vendor_are_refused():
    discovery.use("cpu")
    step = Step([3], [0])
    step.caches = [cache.transpose(1, 2).contiguous() for cache in step.caches]
    with pytest.raises(GraphFallbackError, match="laid out for vendor 'cpu'"):
        lowered(prefill, *step.args)


def test_attention_without_a_write_is_refused():
    def reads(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
        heads = (1, 1, HEADS, KV_HEADS)
        return ops.paged_prefill_attention(q, k, v, k_cache, v_cache, table, BLOCK, ends, lengths, *heads)

    with pytest.raises(GraphFallbackError, match=r"no lowering for dlinfer\.paged_prefill_attention"):
        lowered(reads, *Step([3], [0]).args)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"device": "GPU"}, "device 'GPU'"), ({"precision": "f32"}, "keep its KV cache in bfloat16")],
)
def test_options_that_caches_do_not_fit(options, complaint):
    run, _ = lowered(prefill, *Step([3], [0]).args)
    region: Any = run.regions["region_0"]
    template = region.lowered.template
    template.cache = "bf16"
    assert complaint in (template.misfit(OpenVINOOptions(**options)) or "")
    assert template.misfit(OpenVINOOptions()) is None
    assert CompileOptions().wanted_engine_options == {}


def turned(q, k, v, k_cache, v_cache, slots, table, ends, lengths, places):
    """Attention of queries that are turned by angles of float32."""
    angles = places[:, None].float() * (torch.arange(1, SIZE + 1) / 64)
    q = q * angles.cos().to(q.dtype)[:, None]
    return prefill(q, k, v, k_cache, v_cache, slots, table, ends, lengths), angles.sin()


@pytest.mark.skipif(not has_bfloat16(), reason="without it the cache cannot stay in bfloat16")
def test_float32_beside_attention_in_bfloat16():
    step = Step([3, 1, 40], [40, 0, 31], torch.bfloat16)
    places = torch.arange(5000, 5044)
    angles = places[:, None].float() * (torch.arange(1, SIZE + 1) / 64)
    compiled, report = lowered(turned, *step.args, places)
    got, sines = compiled(*step.args, places)
    torch.testing.assert_close(sines, angles.sin())
    assert [note for region in report.regions for note in region.notes] == []
    step.q = step.q * angles.cos().to(step.q.dtype)[:, None]
    want, _ = step.expected()
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)
