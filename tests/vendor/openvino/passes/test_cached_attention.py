"""Cache write and paged attention as one node: when, how it computes, and what is checked before it runs."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

from dlinfer import ops
from dlinfer.errors import OpArgumentError, PassError
from dlinfer.graph.passes.pipeline import Pass, run_passes
from dlinfer.vendor.openvino.passes.cached_attention import CACHED_ATTENTION, cached_attention_pass
from dlinfer.vendor.openvino.passes.slot_check import CHECK_SLOTS
from tests.graph.compiling import ValueEngine, compiled, use_engine
from tests.graph.passes.fusion.capturing import captured
from tests.graph.passes.fusion.fusing import changes, clean, fired, golden

pytestmark = pytest.mark.usefixtures("graph_mode")
HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
PASS = cached_attention_pass("stub")


class Step:
    """New tokens of sequences over one paged cache: ``new`` of each after ``old``."""

    def __init__(self, new: list[int], old: list[int], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        lengths = [a + b for a, b in zip(new, old, strict=True)]
        width = -(-max(lengths) // BLOCK) + 3
        blocks = len(new) * width + 2
        self.table = torch.randperm(blocks)[: len(new) * width].view(len(new), width)
        self.k_cache = torch.randn(blocks, BLOCK, KV_HEADS, SIZE, dtype=dtype)
        self.v_cache = torch.randn(blocks, BLOCK, KV_HEADS, SIZE, dtype=dtype)
        self.lengths = torch.tensor(lengths)
        self.ends = torch.tensor(new).cumsum(0)
        self.slots = torch.tensor(
            [
                int(self.table[b, position // BLOCK]) * BLOCK + position % BLOCK
                for b, (start, stop) in enumerate(zip(old, lengths, strict=True))
                for position in range(start, stop)
            ],
            dtype=torch.int64,
        )
        tokens = sum(new)
        self.q, self.k, self.v = (
            torch.randn(tokens, n, SIZE, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS)
        )

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, both caches (copies, since they are written), slots, table, ends, lengths."""
        caches = (self.k_cache.clone(), self.v_cache.clone())
        return (self.q, self.k, self.v, *caches, self.slots, self.table, self.ends, self.lengths)

    def check(self, **changed: Any) -> None:
        given = {
            "slots": self.slots,
            "table": self.table,
            "ends": self.ends,
            "lengths": self.lengths,
        } | changed
        caches = [self.k_cache, self.v_cache]
        CHECK_SLOTS(given["slots"], given["table"], BLOCK, given["ends"], given["lengths"], caches)


PROMPTS = Step([3, 1, 6], [0, 5, 2])
DECODING = Step([1, 1, 1], [3, 4, 0])


def prefill(q, k, v, k_cache, v_cache, slots, table, ends, lengths, **options):
    q, k = (q if options else q * 2), k + 1
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    heads = (6, 8, HEADS, KV_HEADS)
    out = ops.paged_prefill_attention(
        q, k, v, k_cache, v_cache, table, BLOCK, ends, lengths, *heads, **{"attn_output": q} | options
    )
    return out + 1


def decode(q, k, v, k_cache, v_cache, slots, table, ends, lengths, **options):
    q, k = q * 2, k + 1
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    out = ops.paged_decode_attention(
        q, k_cache, v_cache, table, BLOCK, ends, lengths, 8, HEADS, KV_HEADS, **{"attn_output": q} | options
    )
    return out + 1


def two_layers(q, k, v, k_cache, v_cache, slots, table, ends, lengths, k_cache_2, v_cache_2):
    out = prefill(q, k, v, k_cache, v_cache, slots, table, ends[:], lengths)
    return prefill(out, k, v, k_cache_2, v_cache_2, slots, table, ends[:], lengths)


def test_golden():
    assert_expected_inline(
        golden(clean(prefill, *PROMPTS.args), PASS),
        """\
l_q_: f32[s0, 4, s1]
l_k_: f32[s0, 2, s1]
l_k_cache_: f32[s2, 4, 2, s1]
l_v_: f32[s0, 2, s1]
l_v_cache_: f32[s2, 4, 2, s1]
l_slots_: i64[s0]
l_table_: i64[s3, s4]
l_ends_: i64[s3]
l_lengths_: i64[s3]
mul = aten.mul.Tensor(l_q_, 2) -> f32[s0, 4, s1]
add = aten.add.Tensor(l_k_, 1) -> f32[s0, 2, s1]
fill_kv_cache = dlinfer.fill_kv_cache(add, l_v_, l_k_cache_, l_v_cache_, l_slots_) -> None
paged_prefill_attention = dlinfer.paged_prefill_attention(mul, l_k_cache_, l_v_cache_, l_table_, 4, l_ends_,
    l_lengths_, 6, 8, 4, 2, mul, 0.3535533905932738, True, -1, -1, 0.0, None, None) -> None
add_1 = aten.add.Tensor(mul, 1) -> f32[s0, 4, s1]
return [add_1]
--->
l_q_: f32[s0, 4, s1]
l_k_: f32[s0, 2, s1]
l_k_cache_: f32[s2, 4, 2, s1]
l_v_: f32[s0, 2, s1]
l_v_cache_: f32[s2, 4, 2, s1]
l_slots_: i64[s0]
l_table_: i64[s3, s4]
l_ends_: i64[s3]
l_lengths_: i64[s3]
mul = aten.mul.Tensor(l_q_, 2) -> f32[s0, 4, s1]
add = aten.add.Tensor(l_k_, 1) -> f32[s0, 2, s1]
check_slots_default = dlinfer_graph.check_slots(l_slots_, l_table_, 4, l_ends_, l_lengths_, [l_k_cache_]) ->
    None
cached_attention_default = dlinfer_graph.cached_attention(mul, add, l_v_, l_k_cache_, l_v_cache_, l_slots_,
    l_table_, 4, l_ends_, l_lengths_, 6, 8, 4, 2, mul, 0.3535533905932738, -1, 0.0, None, None) -> None
add_1 = aten.add.Tensor(mul, 1) -> f32[s0, 4, s1]
return [add_1]
""",
    )


def test_golden_of_decoding():
    assert_expected_inline(
        golden(clean(decode, *DECODING.args), PASS),
        """\
l_q_: f32[s0, 4, s1]
l_k_: f32[s0, 2, s1]
l_k_cache_: f32[s2, 4, 2, s1]
l_v_: f32[s0, 2, s1]
l_v_cache_: f32[s2, 4, 2, s1]
l_slots_: i64[s0]
l_table_: i64[s0, s3]
l_lengths_: i64[s0]
mul = aten.mul.Tensor(l_q_, 2) -> f32[s0, 4, s1]
add = aten.add.Tensor(l_k_, 1) -> f32[s0, 2, s1]
fill_kv_cache = dlinfer.fill_kv_cache(add, l_v_, l_k_cache_, l_v_cache_, l_slots_) -> None
paged_decode_attention = dlinfer.paged_decode_attention(mul, l_k_cache_, l_v_cache_, l_table_, 4, l_lengths_,
    8, 4, 2, mul, 0.3535533905932738, -1, 0.0, None, None) -> None
add_1 = aten.add.Tensor(mul, 1) -> f32[s0, 4, s1]
return [add_1]
--->
l_q_: f32[s0, 4, s1]
l_k_: f32[s0, 2, s1]
l_k_cache_: f32[s2, 4, 2, s1]
l_v_: f32[s0, 2, s1]
l_v_cache_: f32[s2, 4, 2, s1]
l_slots_: i64[s0]
l_table_: i64[s0, s3]
l_lengths_: i64[s0]
mul = aten.mul.Tensor(l_q_, 2) -> f32[s0, 4, s1]
add = aten.add.Tensor(l_k_, 1) -> f32[s0, 2, s1]
check_slots_default = dlinfer_graph.check_slots(l_slots_, l_table_, 4, None, l_lengths_, [l_k_cache_]) -> None
cached_attention_default = dlinfer_graph.cached_attention(mul, add, l_v_, l_k_cache_, l_v_cache_, l_slots_,
    l_table_, 4, None, l_lengths_, 1, 8, 4, 2, mul, 0.3535533905932738, -1, 0.0, None, None) -> None
add_1 = aten.add.Tensor(mul, 1) -> f32[s0, 4, s1]
return [add_1]
""",
    )


def test_layers_share_one_check():
    more = (PROMPTS.k_cache * 2, PROMPTS.v_cache * 2)
    one = clean(two_layers, *PROMPTS.args, *more)
    count, now, before = changes(one, PASS)
    assert count == {PASS.name: 2}
    assert one.count("dlinfer_graph.cached_attention") == 2
    assert one.count("dlinfer_graph.check_slots") == 1
    for a, b in zip(now, before, strict=True):
        assert torch.equal(a, b)


OPTIONS = {
    "plain": {},
    "options and an output of its own": {
        "sliding_window": 3,
        "logit_softcapping": 2.0,
        "softmax_scale": 0.1,
        "attn_output": None,
    },
}


@pytest.mark.parametrize("function", [prefill, decode])
@pytest.mark.parametrize("name", OPTIONS)
def test_numbers(name, function):
    """The caches and the result are what the two ops leave, bit for bit: the merged op calls the same kernels."""
    step = DECODING if function is decode else PROMPTS
    count, now, before = changes(clean(function, *step.args, **OPTIONS[name]), PASS)
    assert count == {PASS.name: 1}
    assert [one.shape for one in now] == [step.q.shape, step.k_cache.shape, step.v_cache.shape]
    for a, b in zip(now, before, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("extra", ["alibi_slopes", "sinks"])
def test_numbers_with_a_value_for_each_head(extra):
    def function(*args):
        return prefill(*args[:-1], **{extra: args[-1]})

    count, now, before = changes(clean(function, *PROMPTS.args, torch.rand(HEADS)), PASS)
    assert count == {PASS.name: 1}
    assert torch.equal(now[0], before[0])


def another_cache(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    ops.fill_kv_cache(k, v, v_cache, k_cache, slots)
    return prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths)


def prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths, **options):
    heads = (6, 8, HEADS, KV_HEADS)
    return ops.paged_prefill_attention(
        q, k, v, k_cache, v_cache, table, BLOCK, ends, lengths, *heads, **options
    )


def read_in_between(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    total = k_cache.sum()
    return prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths) + total


def keys_written_in_between(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    k = k + 1
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    k.mul_(2)
    return prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths) + k.sum()


def another_input_read_in_between(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    total = v.sum()  # which may lie in the cache's memory at a later call
    return prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths) + total


def one_cache(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    values = k_cache[..., :4]
    ops.fill_kv_cache(k, k[..., :4], k_cache, values, slots)
    return prefill_only(q, k, k[..., :4], k_cache, values, table, ends, lengths)


def layers_in_one_tensor(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    caches = torch.stack([k_cache, v_cache])
    ops.fill_kv_cache(k, v, caches[0], caches[1], slots)
    return prefill_only(q, k, v, caches[0], caches[1], table, ends, lengths)


def no_write(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    return prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths)


def without_the_cache(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
    ops.fill_kv_cache(k, v, k_cache, v_cache, slots)
    ones = torch.ones_like(lengths)
    return ops.prefill_attention(q, k, v, k_cache, v_cache, ones, ones, 6, HEADS, KV_HEADS)


REFUSED = {
    "the caches are exchanged": another_cache,
    "the cache is read in between": read_in_between,
    "an input is read in between": another_input_read_in_between,
    "the keys are written in between": keys_written_in_between,
    "the values are a part of the keys": one_cache,
    "the caches are no inputs": layers_in_one_tensor,
    "nothing is written": no_write,
    "the attention does not read the cache": without_the_cache,
    "not causal": lambda *args: prefill(*args, causal=False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_match(name):
    assert fired(REFUSED[name], *PROMPTS.args, steps=(PASS,)) == {}


def test_the_second_attention_over_what_was_written_stays_as_it_is():
    def function(q, k, v, k_cache, v_cache, slots, table, ends, lengths):
        first = prefill(q, k, v, k_cache, v_cache, slots, table, ends, lengths)
        return first + prefill_only(q, k, v, k_cache, v_cache, table, ends, lengths)

    one = clean(function, *PROMPTS.args)
    assert changes(one, PASS)[0] == {PASS.name: 1}
    assert one.count("dlinfer.paged_prefill_attention") == 1


# --- the verifier


def test_the_pipeline_knows_what_the_merged_node_stands_for():
    one = captured(prefill, *PROMPTS.args)
    reports = run_passes(one.graph_module, [PASS])
    assert [edit.what for edit in reports[0].edits] == ["cache write and attention"]
    run_passes(one.graph_module, [PASS])  # nothing is left to merge, and the merged node stands for itself


def test_the_pipeline_refuses_a_merged_node_that_no_pass_answers_for():
    silent = Pass("silent", "says nothing of the writes that it merged", PASS.run)
    with pytest.raises(PassError, match="the writes changed"):
        run_passes(captured(prefill, *PROMPTS.args).graph_module, [silent])


# --- the op and the check


def test_opcheck():
    step = PROMPTS
    out = torch.empty_like(step.q)
    numbers = (6, 8, HEADS, KV_HEADS)
    args = (*step.args[:7], BLOCK, step.ends, step.lengths, *numbers, out, 0.3, -1, 0.0, None, None)
    torch.library.opcheck(CACHED_ATTENTION, args)
    checked = (step.slots, step.table, BLOCK, step.ends, step.lengths, [step.k_cache])
    # "returns nothing and writes nothing": torch takes such an op for one with a hidden effect, and it has none.
    torch.library.opcheck(CHECK_SLOTS, checked, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.parametrize("step", [PROMPTS, Step([1], [0]), Step([4], [0]), Step([5, 1], [4, 7])])
def test_the_slots_of_a_step_pass(step):
    step.check()
    step.check(
        slots=step.slots.int(), table=step.table.int(), ends=step.ends.int(), lengths=step.lengths.int()
    )


def test_slots_of_decoding_pass_with_and_without_ends():
    DECODING.check()
    DECODING.check(ends=None)


def test_what_stands_behind_a_sequence_s_last_block_is_not_looked_at():
    table = DECODING.table.clone()
    table[:, -1] = -(2**40)
    DECODING.check(table=table)


def _with(tensor: torch.Tensor, place: Any, value: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


BAD = {
    "another slot": ({"slots": _with(PROMPTS.slots, 4, 0)}, "kv_start_indices.*token 4.*given 0"),
    "two slots exchanged": ({"slots": PROMPTS.slots.flip(0)}, "kv_start_indices.*token 0"),
    "padding": ({"slots": _with(PROMPTS.slots, 9, -1)}, "kv_start_indices.*token 9.*given -1"),
    "too few slots": ({"slots": PROMPTS.slots[:-1]}, "kv_start_indices.*10 slots.*given 9"),
    "ends before the last token": ({"ends": _with(PROMPTS.ends, 2, 9)}, "kv_start_indices.*9 slots"),
    "falling ends": ({"ends": _with(PROMPTS.ends, 1, 2)}, "kv_seqlens"),
    "more queries than keys": ({"lengths": _with(PROMPTS.lengths, 0, 2)}, "kv_seqlens.*3 to 20.*given 2"),
    "more keys than the table holds": (
        {"lengths": _with(PROMPTS.lengths, 1, 21)},
        "kv_seqlens.*sequence 1.*21",
    ),
    "a block behind the cache": ({"table": _with(PROMPTS.table, (2, 0), 17)}, "block_offsets.*below 17.*17"),
    "a negative block": ({"table": _with(PROMPTS.table, (1, 1), -3)}, "block_offsets.*given -3"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_slots_are_refused(name):
    changed, complaint = BAD[name]
    with pytest.raises(OpArgumentError, match=complaint):
        PROMPTS.check(**changed)


# --- as values


def test_a_region_of_values_checks_first_and_binds_the_caches(monkeypatch):
    """The check runs on the inputs before the engine; both caches may be written where they are."""
    engine = ValueEngine()
    engine.passes = (PASS,)
    use_engine(monkeypatch, engine)
    step = Step([3, 1, 6], [0, 5, 2])
    args, expected = step.args, step.args
    want = prefill(*expected)
    function = compiled(prefill)
    with torch.no_grad():
        assert torch.equal(function(*args), want)
    assert torch.equal(args[3], expected[3])
    assert torch.equal(args[4], expected[4])
    (values,) = engine.functions
    names = [node.name for node in values.graph_module.graph.find_nodes(op="placeholder")]
    assert {names[index] for index in values.in_place} == {"l_k_cache_", "l_v_cache_"}
    before = args[3].clone()
    with torch.no_grad(), pytest.raises(OpArgumentError, match="kv_start_indices"):
        function(*args[:5], step.slots.flip(0), *args[6:])
    assert torch.equal(args[3], before)


def test_no_sequences():
    none = torch.zeros(0, dtype=torch.int64)
    CHECK_SLOTS(none, none.view(0, 3), BLOCK, none, none, [PROMPTS.k_cache])
