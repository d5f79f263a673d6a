"""Loading a stage: what the engine assumes of sizes while it compiles is checked at each call."""

import pytest
import torch
from torch.export import Dim

import dlinfer
from dlinfer.errors import ArtifactInputError
from dlinfer.graph.ir.dialect import fake
from tests.runtime.artifact.artifact_files import Head, Stub, rows, same, saved, use_stub


class Even(Stub):
    """Its regions serve even sizes only. It says so by a guard, as inductor's loops do."""

    def compile(self, region, options):
        for node in region.graph_module.graph.find_nodes(op="placeholder"):
            value = fake(node)
            for size in value.shape if isinstance(value, torch.Tensor) else ():
                assert size % 2 == 0
        return super().compile(region, options)


@pytest.fixture
def head(monkeypatch):
    use_stub(monkeypatch, Even())
    shapes = {"x": {0: Dim("rows", min=2, max=16)}}
    return dlinfer.compile(
        Head().eval(), (rows(6),), dynamic_shapes=shapes, options={"small_regions": "engine"}
    )


def test_a_loaded_stage_keeps_eager_ops(monkeypatch, tmp_path):
    engine = use_stub(monkeypatch)
    head = dlinfer.compile(Head().eval(), (rows(6),), options={"eager_ops": ["aten.linear"]})
    compiled, engine.regions = engine.regions, []
    with dlinfer.load(saved(head, tmp_path / "head.dlinfer")) as session:
        same(session.run({"x": rows(6)}), Head().eval()(rows(6)))
    assert engine.regions == compiled
    assert compiled and not any("aten.linear" in region for region in compiled)


def test_an_artifact_checks_what_its_engine_assumed(head):
    same(head(rows(4)), Head().eval()(rows(4)))
    with pytest.raises(ArtifactInputError, match="== 0"):
        head(rows(5))


def test_a_loaded_stage_checks_what_its_engine_assumed(head, tmp_path):
    with dlinfer.load(saved(head, tmp_path / "head.dlinfer")) as session:
        same(session.run({"x": rows(4)}), Head().eval()(rows(4)))
        with pytest.raises(ArtifactInputError, match="== 0"):
            session.run({"x": rows(5)})
