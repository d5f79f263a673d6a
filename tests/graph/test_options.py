"""Options: each bad one is refused with the valid ones, also by torch.compile; none of them is lost on the way."""

from pathlib import Path

import pytest
import torch

from dlinfer import settings
from dlinfer.errors import CompileOptionError, EngineUnavailableError
from dlinfer.graph.options import CompileOptions
from dlinfer.graph.passes.pipeline import Pass
from dlinfer.graph.passes.registry import pass_names, passes
from tests.graph.compiling import StubEngine, compiled, use_engine

pytestmark = pytest.mark.usefixtures("graph_mode")

BAD = [
    (
        {"unknown": 1},
        ["unknown", "engine, fallback, passes, eager_ops, small_regions, cache_dir, engine_options"],
    ),
    ({"fallback": "never"}, ["'never'", "'allow'", "'warn'", "'error'"]),
    ({"small_regions": True}, ["True", "'eager'", "'engine'"]),
    ({"engine": 3}, ["3", "the name of an engine"]),
    ({"passes": ["cse"]}, ["passes", "a dict of name to bool"]),
    ({"passes": {"clean": False}}, ["'clean'", "cse", "remove_noops"]),
    ({"passes": {"cse": 0}}, ["passes['cse']", "True or False"]),
    ({"eager_ops": "aten.sin"}, ["'aten.sin'", "a list of op names"]),
    ({"eager_ops": ["aten.sin", "aten.softmx"]}, ["'aten.softmx'", "such as aten.softmax"]),
    ({"eager_ops": ["dlinfer.rmsnorm"]}, ["dlinfer.rms_norm"]),
    ({"eager_ops": [3]}, ["'3'", "the name of an op, such as aten.add, dlinfer.rms_norm"]),
    ({"engine_options": "device=CPU"}, ["engine_options", "a dict of name to value"]),
]


@pytest.mark.parametrize(
    ("given", "told"), BAD, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_a_bad_option_is_refused_with_the_valid_ones(given, told):
    with pytest.raises(CompileOptionError) as direct:
        CompileOptions.of(given)
    with torch.no_grad(), pytest.raises(CompileOptionError) as through_torch:
        compiled(lambda x: x + 1, **given)(torch.ones(2))
    for error in (direct.value, through_torch.value):
        for part in told:
            assert part in str(error)


def test_a_refusal_stays_a_refusal_at_the_next_call():
    run = compiled(lambda x: x + 1, unknown=1)
    for sizes in (2, 2, 3, 4):
        with torch.no_grad(), pytest.raises(CompileOptionError):
            run(torch.ones(sizes))


def test_a_mode_of_inductors_is_refused_by_name_with_dlinfers_own_options():
    run = torch.compile(lambda x: x + 1, backend="dlinfer", mode="max-autotune")
    with (
        torch.no_grad(),
        pytest.raises(CompileOptionError, match=r"option 'mode': 'max-autotune'.*options=\{"),
    ):
        run(torch.ones(2))


def test_an_unknown_engine_is_refused_with_the_installed_ones():
    with torch.no_grad(), pytest.raises(EngineUnavailableError, match=r"'tpu9'.*Available: .*inductor"):
        compiled(lambda x: x + 1, engine="tpu9")(torch.ones(2))


def test_an_unknown_engine_of_the_settings_is_refused_likewise():
    with (
        settings.override(engine="tpu9"),
        torch.no_grad(),
        pytest.raises(EngineUnavailableError, match="'tpu9'"),
    ):
        compiled(lambda x: x + 1)(torch.ones(2))


def test_defaults_come_from_the_settings():
    with settings.override(fallback="error", engine="mine", small_regions="engine"):
        chosen = CompileOptions.of(None)
        assert (chosen.policy, chosen.wanted_engine, chosen.keeps_small_regions) == ("error", "mine", True)
        own = CompileOptions.of({"fallback": "allow", "engine": "yours", "small_regions": "eager"})
        assert (own.policy, own.wanted_engine, own.keeps_small_regions) == ("allow", "yours", False)
    assert CompileOptions.of(None).wanted_engine is None


def test_options_are_taken_as_they_are():
    chosen = CompileOptions.of({"cache_dir": "/tmp/x", "passes": {"cse": False, "remove_noops": True}})
    assert chosen.cache_dir == Path("/tmp/x")
    assert chosen.disabled_passes == {"cse"}
    assert CompileOptions.of(chosen) is chosen


def test_eager_ops_are_the_same_in_any_order_and_spelling():
    given = CompileOptions.of({"eager_ops": ["dlinfer.rms_norm", "aten.sin.default", "aten.sin"]})
    assert given == CompileOptions(eager_ops=("aten.sin", "dlinfer.rms_norm"))
    assert given.identity()["eager_ops"] == ("aten.sin", "dlinfer.rms_norm")


@pytest.mark.parametrize("name", pass_names())
def test_every_pass_can_be_left_out(name, monkeypatch):
    from dlinfer.graph.report import report

    use_engine(monkeypatch, StubEngine())
    with torch.no_grad():
        compiled(lambda x: x * 2, passes={name: False})(torch.ones(2))
    ran = [item.name for item in report.reports()[-1].passes]
    assert name not in ran
    assert set(ran) == {item.name for item in passes()} - {name}


def test_a_check_that_results_depend_on_cannot_be_left_out():
    assert "select_bounds" in {item.name for item in passes() if item.always}
    with pytest.raises(CompileOptionError, match="select_bounds"):
        CompileOptions.of({"passes": {"select_bounds": False}})


class OwnOptions(StubEngine):
    """An engine with an option and a pass of its own."""

    def __init__(self):
        super().__init__()
        self.given: list[dict] = []
        self.ran = 0
        self.passes = (Pass("stub.count", "to see that it runs", self._count),)

    def _count(self, graph_module):
        self.ran += 1
        return []

    def check_options(self, options):
        self.given.append(dict(options))
        for name, value in options.items():
            if name != "level":
                raise CompileOptionError(option=name, given=value, expected="one of level")


@pytest.fixture
def own(monkeypatch):
    engine = OwnOptions()
    use_engine(monkeypatch, engine)
    return engine


def test_the_engine_checks_its_own_options(own):
    with torch.no_grad():
        compiled(lambda x: x + 1, engine_options={"level": 3})(torch.ones(2))
        with pytest.raises(CompileOptionError, match=r"'colour'.*one of level"):
            compiled(lambda x: x + 2, engine_options={"colour": 3})(torch.ones(2))
    assert own.given == [{"level": 3}, {"colour": 3}]


@pytest.mark.parametrize("engine", ["inductor", None])
def test_an_engine_without_options_takes_none(engine):
    with torch.no_grad(), pytest.raises(CompileOptionError, match=r"engine_options\['level'\].*no options"):
        compiled(lambda x: x + 1, engine=engine, engine_options={"level": 3})(torch.ones(2))


def test_an_engine_s_own_passes_run_after_the_common_ones_and_can_be_left_out(own):
    from dlinfer.graph.report import report

    with torch.no_grad():
        compiled(lambda x: x + 1)(torch.ones(2))
        assert own.ran == 1
        assert report.reports()[-1].passes[-1].name == "stub.count"
        compiled(lambda x: x + 2, passes={"stub.count": False})(torch.ones(2))
        assert own.ran == 1
        with pytest.raises(CompileOptionError, match=r"'stub\.other'.*'stub' has \(stub\.count\)"):
            compiled(lambda x: x + 3, passes={"stub.other": False})(torch.ones(2))


def test_engine_options_of_the_settings_go_to_the_engine_of_the_settings():
    text = "device=GPU.0, num_threads=4,fast=true,share=0.5"
    read = {"device": "GPU.0", "num_threads": 4, "fast": True, "share": 0.5}
    with settings.override(engine="mine", engine_options=text):
        assert CompileOptions().wanted_engine_options == read
        assert CompileOptions(engine="mine", engine_options={"device": "CPU"}).wanted_engine_options == (
            read | {"device": "CPU"}
        )
        assert CompileOptions(engine="yours", engine_options={"a": 1}).wanted_engine_options == {"a": 1}
    assert CompileOptions().wanted_engine_options == {}
