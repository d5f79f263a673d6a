"""What of a mixture of experts and of a prefill runs in chains: whole blocks, with the results of single calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import GraphRunError, OpArgumentError
from dlinfer.graph.ir.program import Joined, Program, Step
from dlinfer.ops.core.kernels import kernel_authors
from dlinfer.ops.quantised import bf12
from dlinfer.vendor.cpu import native
from dlinfer.vendor.cpu.inductor import kernels
from dlinfer.vendor.cpu.inductor.engine import InductorEngine
from tests.graph.compiling import compiled, interpreted_engine, use_engine
from tests.vendor.cpu.prefill_case import Case

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 64, 32, 6, 2


class Recording(InductorEngine):
    """Keeps the programs that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[Program] = []

    def compile(self, region: Any, options: Any) -> Any:
        result = super().compile(region, options)
        assert isinstance(result.run, Program)
        self.programs.append(result.run)
        return result

    def unchained(self) -> list[Program]:
        """The same programs, step by step."""
        return [
            Program(one.name, one.inputs, one.steps, one.output, one.resolve, one.constants)
            for one in self.programs
        ]

    def told(self) -> str:
        """Lines of all programs that are neither sizes nor checks of them; those of chains with their steps."""
        lines = []
        for program in self.programs:
            for line in program._lines:
                if isinstance(line, Joined):
                    lines += ["chain", *(f"  {_name(part)}" for part in line.parts)]
                elif line.kind != "size" and "_assert_scalar" not in line.callee:
                    lines.append(_name(line))
        return "\n".join(lines)


def _name(step: Step) -> str:
    name = step.callee.removeprefix("op aten.").removesuffix(".default")
    return name.partition(" ")[0] if name.startswith("cluster") else name


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, graph_mode: None) -> Recording:
    reason = native.why_not()
    if reason is not None:
        pytest.skip(reason)
    interpreted_engine(monkeypatch)
    made = Recording()
    use_engine(monkeypatch, made)
    return made


def run(function: Callable[..., Any], *given: Any) -> Any:
    with torch.no_grad():
        return compiled(function, dynamic=True)(*given)


def mixture(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor) -> Tensor:
    """As a Qwen3-MoE's block."""
    normed = ops.rms_norm(x, norm, 1e-6)
    weights, ids = ops.moe_gating_topk_softmax(ops.linear(normed, router), TOPK)
    return ops.rms_norm(ops.fused_moe(normed, gate_up, down, weights, ids, TOPK, True), norm, 1e-6)


def clamped(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor, inner: Tensor, outer: Tensor
) -> Tensor:
    normed = ops.rms_norm(x, norm, 1e-6)
    weights, ids = ops.moe_gating_topk_softmax(ops.linear(normed, router), TOPK)
    return ops.fused_moe_clamped(normed, gate_up, inner, down, outer, weights, ids, 1.702, 7.0)


def of_experts(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    shapes = [
        (tokens, HIDDEN),
        (EXPERTS, HIDDEN),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
        (HIDDEN,),
    ]
    return [torch.randn(shape, generator=draw).mul(0.2).to(dtype) for shape in shapes]


def of_prefill(lengths: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """What ``paged`` takes, for sequences of (queries, keys); what it writes is its own."""
    case = Case(len(lengths), lengths, 2, 2, (32, 32), dtype=dtype)
    tokens, keys = int(case.ends[-1]), int(case.kv_lens.sum())
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).mul(0.1).to(dtype)
    caches = [one.nan_to_num(0.0) for one in (case.k_cache, case.v_cache)]
    lengths_given = (case.pages.clamp_min(0), case.ends, case.kv_lens, int(case.kv_lens.max()))
    return [case.q[:tokens].flatten(1), case.k[:keys], case.v[:keys], weight, *caches, *lengths_given]


def paged(x, k, v, weight, k_cache, v_cache, pages, ends, kv_lens, longest):
    """Two layers over the pages of a cache, which they do not write; the result lies where the query does."""
    for _ in range(2):
        q = ops.linear(x, weight).unflatten(-1, (4, 32))
        lengths = (pages, k_cache.shape[1], ends, kv_lens, longest, longest, 4, 2)
        out = ops.paged_prefill_attention(q, k, v, k_cache, v_cache, *lengths, attn_output=q)
        x = ops.linear(out.flatten(1), weight)
    return x


def packed(x, k, v, weight, k_cache, v_cache, pages, ends, kv_lens, longest):
    """The same over keys and values that stand packed, of sequences without a history."""
    for _ in range(2):
        q = ops.linear(x, weight).unflatten(-1, (4, 32))
        given = {"actual_seq_lengths_cpu": ends, "sliding_window": 20}
        out = ops.prefill_attention(q, k, v, None, None, ends, kv_lens, longest, 4, 2, **given)
        x = ops.linear(out.flatten(1), weight)
    return x


def same_with_and_without_chains(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *calls: list[Any]
) -> list[Any]:
    """What one compilation gives for all calls, which is to the bit what it gives without chains."""
    results = []
    for joined in (True, False):
        engine = Recording()
        if not joined:
            monkeypatch.setattr(engine, "join", None)
        use_engine(monkeypatch, engine)
        torch._dynamo.reset()
        run_it = compiled(function, dynamic=True)
        with torch.no_grad():
            results.append([run_it(*given) for given in calls])
        assert ("chain" in engine.told()) is joined
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    return results[0]


def test_a_mixture_is_one_chain(engine: Recording) -> None:
    run(mixture, *of_experts(3))
    assert_expected_inline(
        engine.told(),
        """\
chain
  native rms_norm
  native linear
  native moe_gating_topk_softmax
  layout
  layout
  native fused_moe
  native results_escape
  native rms_norm
  native results_escape""",
    )


def shared(x: Tensor, routed: Tensor, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """As a Qwen2-MoE's expert that all tokens share, added in place to what the others gave."""
    total = ops.linear(routed, weight)
    own = ops.linear(ops.silu_and_mul(ops.linear(x, up)), weight)
    own = torch.sigmoid(ops.linear(x, gate)) * own
    total += own
    return ops.rms_norm(total, gate[0], 1e-6)


def of_shared(tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, HIDDEN), (tokens, HIDDEN), (1, HIDDEN), (2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN)]
    return [torch.randn(shape, generator=draw).mul(0.3).to(dtype) for shape in shapes]


def test_a_shared_expert_is_one_chain(engine: Recording) -> None:
    run(shared, *of_shared(3))
    assert_expected_inline(
        engine.told(),
        """\
chain
  native linear
  native linears
  layout
  native silu_and_mul
  native linear
  layout
  select.int
  native gated_sum
  native results_escape
  native rms_norm
  native results_escape""",
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_experts_have_the_bits_of_torch(dtype, engine, monkeypatch) -> None:
    calls = [of_shared(tokens, dtype) for tokens in (3, 2, 40)]
    for got, given in zip(same_with_and_without_chains(monkeypatch, shared, *calls), calls, strict=True):
        assert torch.equal(got, shared(*given))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, gate, y: x + torch.sigmoid(gate) * y * 2,
        lambda x, gate, y: torch.add(x, torch.sigmoid(gate) * y, alpha=2),
        lambda x, gate, y: x - torch.sigmoid(gate) * y,
        lambda x, gate, y: x + torch.sigmoid(y) * y,
        lambda x, gate, y: (torch.sigmoid(gate) * y, x + torch.sigmoid(gate) * y),
        lambda x, gate, y: x + torch.sigmoid(gate.float()) * y,
        lambda x, gate, y: x[:1] + torch.sigmoid(gate) * y,
        lambda x, gate, y: x + torch.sigmoid(gate[:1]) * y,
    ],
    ids=["twice", "alpha", "minus", "its own gate", "read elsewhere", "wider", "one row", "one gate"],
)
def test_other_sums_are_clusters(function, engine: Recording) -> None:
    x, y, gate = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16(), torch.randn(3, 1).bfloat16()
    run(function, x, gate, y)
    assert "native gated_sum" not in engine.told() and "cluster" in engine.told()


def test_a_clamped_mixture_is_one_chain(engine: Recording) -> None:
    biases = [torch.randn(EXPERTS, size).bfloat16() for size in (2 * INTERMEDIATE, HIDDEN)]
    run(clamped, *of_experts(3), *biases)
    assert_expected_inline(
        engine.told(),
        """\
chain
  native rms_norm
  native linear
  native moe_gating_topk_softmax
  layout
  layout
  native results_escape
  native fused_moe_clamped
  native results_escape""",
    )


def test_a_prefill_is_one_chain(engine: Recording) -> None:
    run(paged, *of_prefill([(5, 5), (3, 40)]))
    assert_expected_inline(
        engine.told(),
        """\
chain
  native linear
  unflatten.int
  native paged_prefill_attention
  flatten.using_ints
  native linear
  native linear
  unflatten.int
  native paged_prefill_attention
  flatten.using_ints
  native results_escape
  native linear
  native results_escape""",
    )


def test_a_prefill_of_packed_keys_is_one_chain(engine: Recording) -> None:
    run(packed, *of_prefill([(5, 5), (30, 30)]))
    assert_expected_inline(
        engine.told(),
        """\
native linear
unflatten.int
new_empty
chain
  layout
  native prefill_attention
  flatten.using_ints
  native linear
  native linear
  unflatten.int
new_empty
chain
  layout
  native prefill_attention
  flatten.using_ints
  native results_escape
  native linear
  native results_escape""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixtures_give_the_same_with_and_without_chains(dtype, engine, monkeypatch) -> None:
    calls = [of_experts(tokens, dtype) for tokens in (3, 2, 40)]
    found = same_with_and_without_chains(monkeypatch, mixture, *calls)
    tolerance = ops.fused_moe.tolerances[dtype]
    for got, given in zip(found, calls, strict=True):
        torch.testing.assert_close(got, mixture(*given), rtol=4 * tolerance.rtol, atol=4 * tolerance.atol)


@pytest.mark.parametrize("function", [paged, packed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prefills_give_the_same_with_and_without_chains(dtype, function, engine, monkeypatch) -> None:
    lengths = [[(5, 5), (30, 30)], [(2, 2), (7, 7), (100, 100)], [(4, 4), (2, 2)]]
    calls = [of_prefill(one, dtype) for one in lengths]
    for got, given in zip(same_with_and_without_chains(monkeypatch, function, *calls), calls, strict=True):
        assert got.isfinite().all() and got.abs().sum() > 0
        torch.testing.assert_close(got, function(*given), rtol=2e-2, atol=2e-2)


def chosen(x: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Experts that somebody else chose."""
    normed = ops.rms_norm(ops.rms_norm(x, norm, 1e-6), norm, 1e-6)
    return ops.rms_norm(ops.fused_moe(normed, gate_up, down, weights, ids, TOPK, True), norm, 1e-6)


@pytest.mark.parametrize("bad", [-1, EXPERTS])
@pytest.mark.parametrize("joined", [True, False])
def test_ids_that_name_no_expert_are_the_ops_error_with_the_models_line(
    bad: int, joined: bool, engine: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not joined:
        monkeypatch.setattr(engine, "join", None)
    x, _, gate_up, down, norm = of_experts(4)
    weights, ids = torch.rand(4, TOPK), torch.zeros(4, TOPK, dtype=torch.int64)
    ours = compiled(chosen)
    with torch.no_grad():
        want = ours(x, gate_up, down, norm, weights, ids)
        ids[2, 1] = bad
        with pytest.raises(
            OpArgumentError, match=r"fused_moe: argument topk_ids: expected ids of 0\.\.5"
        ) as info:
            ours(x, gate_up, down, norm, weights, ids)
        with pytest.raises(OpArgumentError) as eager:
            chosen(x, gate_up, down, norm, weights, ids)
        ids[2, 1] = 0
        assert torch.equal(ours(x, gate_up, down, norm, weights, ids), want)
    assert ("chain" in engine.told()) is joined
    assert str(info.value) == str(eager.value) and info.value.fields == eager.value.fields
    where = info.value.__cause__
    assert isinstance(where, GraphRunError)
    assert where.fields["op"] == "native fused_moe" and "/ops/moe/" in where.fields["line"]


def test_a_prefills_error_names_the_step_and_the_models_line(engine: Recording) -> None:
    given = of_prefill([(5, 5), (3, 40)])
    ours = compiled(paged, dynamic=True)
    with torch.no_grad():
        ours(*given)
        given[6] = given[6].clone()
        given[6][1, 0] = 99
        with pytest.raises(GraphRunError, match=r"block index 99 of sequence 1") as info:
            ours(*given)
    assert info.value.fields["op"] == "native paged_prefill_attention"
    assert "ops/attention/paged_prefill.py" in info.value.fields["line"]


# --- what is left to the vendor's functions


def strided(q, k, v, ends, out):
    ops.prefill_attention(
        q, k, v, None, None, ends, ends, 8, 2, 2, attn_output=out, actual_seq_lengths_cpu=ends
    )
    return out * 1


def prefill_of(**changed: Tensor) -> dict[str, Tensor]:
    plain = {name: torch.randn(8, 2, 16).bfloat16() for name in ("q", "k", "v", "out")}
    return plain | {"ends": torch.tensor([8])} | changed


def apart(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(8, 2, 32).to(dtype)[..., ::2]


@pytest.mark.parametrize(
    ("changed", "callee"),
    [
        ({}, "native prefill_attention"),
        ({"q": apart()}, "vendor prefill_attention"),
        ({"k": apart()}, "vendor prefill_attention"),
        ({"v": apart()}, "vendor prefill_attention"),
        ({"out": apart()}, "vendor prefill_attention"),
        (dict.fromkeys(("q", "k", "v", "out"), torch.randn(8, 2, 16).double()), "vendor prefill_attention"),
    ],
    ids=["plain", "q", "k", "v", "out", "float64"],
)
def test_what_the_kernel_does_not_read_as_it_is_stays_with_the_vendors_function(
    changed, callee, engine
) -> None:
    given = {name: one.clone(memory_format=torch.preserve_format) if one.is_contiguous() else one
             for name, one in prefill_of(**changed).items()}  # fmt: skip
    run(strided, *(given[name] for name in ("q", "k", "v", "ends", "out")))
    (found,) = [step.callee for step in engine.programs[0].steps if "prefill" in step.callee]
    assert found == callee


def test_another_vendors_kernels_are_called(engine: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    authors = dict.fromkeys(("fused_moe", "moe_gating_topk_softmax"), "another")
    monkeypatch.setattr(kernels, "kernel_authors", lambda vendor: {**kernel_authors(vendor), **authors})
    run(mixture, *of_experts(3))
    found = {step.callee for step in engine.programs[0].steps}
    assert {"vendor fused_moe", "vendor moe_gating_topk_softmax"} <= found


def test_experts_in_float64_are_the_vendors(engine: Recording) -> None:
    given = of_experts(3, torch.float64)
    torch.testing.assert_close(run(mixture, *given), mixture(*given))
    found = {step.callee for step in engine.programs[0].steps}
    assert {"vendor fused_moe", "vendor moe_gating_topk_softmax"} <= found


def rows_of_table(table: Tensor, places: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(torch.nn.functional.embedding(places, table), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_are_taken_in_a_chain_step(dtype: torch.dtype, engine: Recording) -> None:
    given = torch.randn(50, 24).to(dtype), torch.tensor([[4, 49, 7], [0, 4, 4]]), torch.randn(8, 24).to(dtype)
    once = compiled(rows_of_table, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(once(*given), rows_of_table(*given))
        assert {step.callee for step in engine.programs[0].steps} >= {"native embedding", "native linear"}
        with pytest.raises(GraphRunError, match="index out of range in self: 53 of 50 rows"):
            once(given[0], given[1] + 4, given[2])


@pytest.mark.parametrize(
    "table", [torch.randn(50, 24).double(), torch.randn(24, 50).t()], ids=["float64", "columns"]
)
def test_a_table_that_the_kernel_would_copy_or_not_take_is_torchs(table: Tensor, engine: Recording) -> None:
    given = table, torch.tensor([[4, 49, 7], [0, 4, 4]]), torch.randn(8, 24).to(table.dtype)
    torch.testing.assert_close(run(rows_of_table, *given), rows_of_table(*given))
    assert "op aten.embedding.default" in {step.callee for step in engine.programs[0].steps}


def in_12_bits(ids: Tensor, table: Tensor, up: Tensor, down: Tensor, experts: list[Tensor]) -> Tensor:
    """A tied embedding, an MLP and experts, all of weights that are packed without loss."""
    x = ops.embedding_bf12(ids, table, 40, HIDDEN)
    x = ops.silu_and_mul(ops.linear_bf12(x, up, out_features=2 * HIDDEN))
    x = ops.linear_bf12(x, down, out_features=HIDDEN)
    weights, chosen = ops.moe_gating_topk_softmax(x[:, :EXPERTS].contiguous(), TOPK)
    x = ops.fused_moe_bf12(x, *experts, weights, chosen, True, EXPERTS, INTERMEDIATE)
    return ops.linear_bf12(x, table, out_features=40)


def plainly(ids: Tensor, table: Tensor, up: Tensor, down: Tensor, experts: list[Tensor]) -> Tensor:
    """The same of the plain weights."""
    x = ops.linear(ops.silu_and_mul(ops.linear(table[ids], up)), down)
    weights, chosen = ops.moe_gating_topk_softmax(x[:, :EXPERTS].contiguous(), TOPK)
    x = ops.fused_moe(x, *experts, weights, chosen, TOPK, True)
    return ops.linear(x, table)


def test_packed_weights_are_one_chain_with_the_bits_of_plain_ones(engine: Recording) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(40, HIDDEN), (2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN)]
    shapes += [(EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)]
    *dense, gate_up, out = (torch.randn(shape, generator=draw).mul(0.3).bfloat16() for shape in shapes)
    stacks = [gate_up, out]
    ids = torch.tensor([3, 0, 39, 3])
    packed = [bf12.pack(one) for one in dense], [bf12.pack(one.flatten(0, 1)) for one in stacks]
    got = compiled(in_12_bits)(ids, *packed[0], packed[1])
    assert_expected_inline(
        engine.told(),
        """\
chain
  native embedding_bf12
  native linear_bf12_silu_and_mul
  native linear_bf12
slice.Tensor
contiguous
chain
  layout
  native moe_gating_topk_softmax
  layout
  layout
  native fused_moe_bf12
  native linear_bf12""",
    )
    table, up, down = dense
    assert torch.equal(got, plainly(ids, table, up, down, stacks))
