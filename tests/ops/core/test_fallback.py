"""The fallback policy: allow, warn or error when a vendor has no native kernel for a call; every case is counted."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlinfer import ops, settings
from dlinfer.errors import FallbackError, GraphFallbackError, KernelDeclined, KernelFailureError
from dlinfer.graph.report import report
from dlinfer.ops.core import fallback, kernels
from dlinfer.ops.core.fallback import Fallback, FallbackWarning
from dlinfer.vendor import Probe, Vendor
from dlinfer.vendor.base import refuses

DECLINED = Fallback("rms_norm", "picky", "rows longer than 8 are not served")
MISSING = Fallback("silu_and_mul", "picky", "the vendor has no kernel for this op")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.shape[-1] > 8:
        raise KernelDeclined(reason="rows longer than 8 are not served")
    return torch.full_like(x, 7.0)


def failing(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of scratch memory\nand more lines")


PICKY = Vendor("picky", "cpu", "made for a test", lambda: Probe(True, ""), lambda: {"rms_norm": rms_norm})


@pytest.fixture(autouse=True)
def picky(activate):
    activate(PICKY)


def call(size: int = 16) -> torch.Tensor:
    return ops.rms_norm(torch.ones(2, size), torch.ones(size), 1e-6)


def test_a_call_that_the_kernel_takes_is_no_fallback():
    assert torch.equal(call(8), torch.full((2, 8), 7.0))
    assert fallback.counts() == {}


@pytest.mark.parametrize("policy", ["allow", "warn"])
def test_allow_and_warn_run_the_reference_and_count(policy):
    with settings.override(fallback=policy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            torch.testing.assert_close(call(), torch.ones(2, 16))
        torch.testing.assert_close(ops.silu_and_mul(torch.ones(2, 8)), torch.full((2, 4), 0.7310586))
    assert fallback.counts() == {DECLINED: 3, MISSING: 1}
    fallback.reset()
    assert fallback.counts() == {}


def test_allow_is_quiet():
    with settings.override(fallback="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


def test_warn_says_so_once_for_each_reason_with_the_models_line():
    with settings.override(fallback="warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
        ops.silu_and_mul(torch.ones(2, 8))
    texts = [str(warning.message) for warning in caught if warning.category is FallbackWarning]
    assert len(texts) == 2
    assert "'picky'" in texts[0]
    assert DECLINED.reason in texts[0]
    assert "float32[2, 16], float32[16], 1e-06" in texts[0]
    assert f"{__file__}:" in texts[0]
    assert MISSING.reason in texts[1]


def test_error_refuses_with_the_way_out_and_counts_nothing():
    with (
        settings.override(fallback="error"),
        pytest.raises(FallbackError, match="DLINFER_FALLBACK=warn") as caught,
    ):
        call()
    assert caught.value.fields["reason"] == DECLINED.reason
    assert fallback.counts() == {}


# --- asked before anything runs

NARROW = "rows longer than 8 are not served"


@refuses(lambda x, weight, eps: NARROW if x.shape[-1] > 8 else None)
def narrow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert x.shape[-1] <= 8, "a call that was refused"
    return torch.full_like(x, 7.0)


@pytest.fixture
def says_first(activate):
    """The vendor ``says``, whose kernel has a rule."""
    activate(Vendor("says", "cpu", "made for a test", lambda: Probe(True, ""), lambda: {"rms_norm": narrow}))


@pytest.mark.usefixtures("says_first")
def test_a_call_that_a_rule_refuses_runs_on_the_reference_by_the_policy():
    assert torch.equal(call(8), torch.full((2, 8), 7.0))
    with settings.override(fallback="allow"):
        torch.testing.assert_close(call(), torch.ones(2, 16))
        direct = kernels.direct_kernel("rms_norm", "cpu")
        torch.testing.assert_close(direct(torch.ones(2, 16), torch.ones(16), eps=1e-6), torch.ones(2, 16))
    assert fallback.counts() == {Fallback("rms_norm", "says", NARROW): 2}
    with settings.override(fallback="error"), pytest.raises(FallbackError, match=NARROW):
        call()


@pytest.mark.usefixtures("says_first")
def test_kernels_are_asked_with_fakes():
    with FakeTensorMode():
        long, short = ((torch.empty(2, size), torch.empty(size), 1e-6) for size in (16, 8))
        gated = (torch.empty(2, 8),)
    assert kernels.refusal("rms_norm", "cpu", long) == NARROW
    assert kernels.refusal("rms_norm", "cpu", short) is None
    assert kernels.refusal("silu_and_mul", "cpu", gated) == MISSING.reason
    assert fallback.counts() == {}  # nothing was run


@refuses(lambda router_logits, topk, n_groups: "more than two experts are not served" if topk > 2 else None)
def choose_two(router_logits: torch.Tensor, topk: int, n_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.moe_gating_topk_softmax.reference(router_logits, topk, n_groups)


def test_a_graph_tells_of_the_reference_before_it_runs(activate):
    name = "moe_gating_topk_softmax"
    activate(Vendor("two", "cpu", "made for a test", lambda: Probe(True, ""), lambda: {name: choose_two}))
    logits = torch.randn(3, 8)

    def run(topk: int) -> list[tuple[str, str]]:
        torch._dynamo.reset()
        chosen = torch.compile(
            lambda logits: ops.moe_gating_topk_softmax(logits, topk),
            backend="dlinfer",
            options={"engine": "inductor"},
        )
        with torch.no_grad():
            weights, experts = chosen(logits)
        assert weights.shape == experts.shape == (3, topk)
        return [(node.place, node.reason) for node in report.reports()[-1].nodes if name in node.op]

    reason = "more than two experts are not served"
    assert run(2) == [("engine", "")]
    with pytest.raises(GraphFallbackError, match=reason):
        run(3)
    assert fallback.counts() == {}  # neither was run
    with settings.override(fallback="allow"):
        assert run(3) == [("eager", reason)]


def test_a_kernel_that_fails_is_not_replaced_in_silence(activate):
    activate(Vendor("broken", "cpu", "", lambda: Probe(True, ""), lambda: {"silu_and_mul": failing}))
    with (
        settings.override(fallback="allow"),
        pytest.raises(KernelFailureError, match="RuntimeError: out of scratch memory"),
    ):
        ops.silu_and_mul(torch.ones(2, 8))
    assert fallback.counts() == {}


def test_memory_that_ran_out_is_left_for_schedulers_to_catch(activate):
    def full(router_logits, topk, n_groups):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    activate(Vendor("full", "cpu", "", lambda: Probe(True, ""), lambda: {"moe_gating_topk_softmax": full}))
    choose = ops.moe_gating_topk_softmax
    compiled = torch.compile(
        lambda logits: choose(logits, 2), backend="dlinfer", options={"engine": "inductor"}
    )
    for call in (lambda logits: choose(logits, 2), compiled):
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="20 GiB"):
            call(torch.ones(2, 8))


def test_argument_rules_go_before_kernels_and_fallback():
    with pytest.raises(Exception, match="argument weight"):
        ops.rms_norm(torch.ones(2, 16), torch.ones(17), 1e-6)
    assert fallback.counts() == {}
