"""An engine that is wrong on the CPU at hand is refused what it is wrong in, with the reason; results stay right."""

import json
import re
from dataclasses import replace
from typing import Any

import openvino as ov
import openvino.opset16 as op
import pytest
import torch

from dlinfer import settings
from dlinfer.cli import main
from dlinfer.graph import engine as engines
from dlinfer.graph.report import report as reports
from dlinfer.ops.core import fallback
from dlinfer.vendor import discovery
from dlinfer.vendor.openvino import registry, selftest
from dlinfer.vendor.openvino.engine import OpenVINOEngine
from dlinfer.vendor.openvino.lowerings import comparison
from dlinfer.vendor.openvino.selftest import PAGED, cases

nan = float("nan")


@pytest.fixture
def fresh(monkeypatch, tmp_path, graph_mode):
    """An engine that has not been asked anything, with a cache folder of its own."""
    engine = OpenVINOEngine()
    monkeypatch.setitem(engines._engines, ("openvino", "openvino"), engine)
    with settings.override(cache_dir=str(tmp_path)):
        yield engine


@pytest.fixture
def wrong_about_nan(monkeypatch, fresh):
    """gt as a CPU with AVX-512 has it: not less or equal, which is true of NaN."""
    true_of_nan = comparison._compares(lambda x, y: op.logical_not(op.less_equal(x, y)).output(0))
    for target in (torch.ops.aten.gt.Tensor, torch.ops.aten.gt.Scalar):
        monkeypatch.setitem(registry._table, target, replace(registry._table[target], build=true_of_nan))
    return fresh


def compared(x, y):
    return (x > y).float() * 2 + x.exp() - y, x < y


X, Y = torch.tensor([[1.0, nan, 3.0, nan]] * 3), torch.tensor([[0.0, 1.0, nan, nan]] * 3)


def test_a_wrong_gt_is_refused_with_its_reason_counted_and_the_result_is_right(wrong_about_nan):
    fallback.reset()
    compiled = torch.compile(
        compared, backend="dlinfer", options={"engine": "openvino", "small_regions": "engine"}, dynamic=True
    )
    for one, other in zip(compiled(X, Y), compared(X, Y), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    (reason,) = {kind.reason for kind in fallback.counts() if kind.vendor == "openvino"}
    assert re.match(
        r"OpenVINO 20\d\d\.\S+ on this CPU gets 'gt of NaN and infinities' wrong in float32: ", reason
    )
    assert "the first is True, expected False" in reason
    (found,) = reports.reports()
    assert list(found.refusals()) == [("aten.gt.Tensor", reason)]
    assert "aten.lt.Tensor" in [node.op for node in found.placed("engine")]


@pytest.mark.full
def test_the_doctor_says_so_and_so_does_the_cache(wrong_about_nan, capsys, tmp_path):
    torch.compile(
        compared, backend="dlinfer", options={"engine": "openvino", "small_regions": "engine"}, dynamic=True
    )(X, Y)
    main(["doctor"])
    assert "openvino: 'gt of NaN and infinities' failed in float32:" in capsys.readouterr().out
    main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)["selftests"]
    (ours,) = [one for one in found if one["engine"] == "openvino"]
    assert [(one["name"], one["covers"]) for one in ours["failed"]] == [
        ("gt of NaN and infinities", ["aten.greater", "aten.gt"])
    ]
    kept = [json.loads(path.read_bytes().rpartition(b"\n")[2]) for path in (tmp_path / "selftest").iterdir()]
    assert [one["covers"] for one in kept if one["state"] == "failed"] == [["aten.greater", "aten.gt"]]


def test_as_written_gt_depends_on_less_alone(fresh):
    """The plugin's own Greater says true of NaN on some CPUs."""
    assert fresh.selftest.failure("aten.gt", "float32") is None
    model = comparison.greater(*(op.parameter([3], ov.Type.f32).output(0) for _ in range(2))).get_node()
    assert model.get_type_name() == "Less"


@pytest.fixture
def own_caches():
    """KV caches laid out as OpenVINO's attention needs them."""
    discovery.use("openvino")
    yield
    discovery.use("cpu")


def test_garbage_from_paged_attention_in_float16_is_refused_in_float16_alone(monkeypatch, fresh, own_caches):
    """Where the plugin's answer is off, as it is on one CPU with AVX-512, nobody gets it."""
    off = [
        replace(
            one, run=lambda one=one: [value + 7 * (one.precision == "float16") for value in one.expected()]
        )
        for one in cases(fresh)
        if "paged" in one.name
    ]
    monkeypatch.setattr(fresh.selftest, "cases", lambda: off)
    kind = PAGED[0].covers[0]
    assert "gets 'paged attention, prefill, blocks of 32' wrong in float16" in str(
        fresh.selftest.failure(kind, "float16")
    )
    assert fresh.selftest.failure(kind, "float32") is None


def test_attention_is_asked_only_while_caches_lie_as_it_needs_them(monkeypatch, fresh):
    asked = []
    paged = [
        replace(one, run=lambda one=one: asked.append(one.name) or one.expected())
        for one in cases(fresh)
        if "paged" in one.name and one.precision == "float32"
    ]
    monkeypatch.setattr(fresh.selftest, "cases", lambda: paged)
    discovery.use("cpu")
    kind = PAGED[0].covers[0]
    assert fresh.selftest.failure(kind, "float32") is None
    assert "laid out for vendor 'cpu'" in fresh.selftest.results()[0].reason
    assert not asked
    discovery.use("openvino")
    try:
        assert fresh.selftest.failure(kind, "float32") is None
    finally:
        discovery.use("cpu")
    assert len(asked) == 2


def test_a_precision_of_the_engine_s_own_is_asked_for_the_whole_region(monkeypatch, fresh):
    """engine_options["precision"] lets a float32 model compute in float16."""
    failure = fresh.selftest.failure
    monkeypatch.setattr(
        fresh.selftest,
        "failure",
        lambda op, precision: (
            "planted" if (op, precision) == ("aten.exp", "float16") else failure(op, precision)
        ),
    )
    options: dict[str, Any] = {"engine": "openvino", "small_regions": "engine"}
    narrowed: dict[str, Any] = {**options, "engine_options": {"precision": "f16"}}
    torch.compile(exp, backend="dlinfer", options=options)(X)
    torch.compile(exp, backend="dlinfer", options=narrowed)(X)
    plain, narrow = reports.reports()
    assert not plain.refusals()
    assert ("aten.exp", "planted") in narrow.refusals()


def exp(x):
    return x.exp() + 1


@pytest.mark.full
def test_every_question_is_right_or_not_taken_on_this_cpu_or_says_what_is_wrong(fresh):
    wrong = [one for one in fresh.selftest.results() if one.state == "failed"]
    for one in wrong:  # a finding of this CPU, not of the code: show it
        print(f"{selftest._version()}: {one}")
    assert all(one.reason for one in wrong)
