"""DLINFER_DEBUG: what each topic prints, and that a topic that does not exist is refused."""

import pytest
import torch

from dlinfer import explain, settings
from dlinfer.errors import SettingError
from dlinfer.graph.ir.dialect import describe
from dlinfer.vendor.cpu import native


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.to(torch.float32), y).view(-1)


@pytest.fixture
def printed(capfd, tmp_path):
    """``printed(topics)`` compiles a product and gives what stands on stderr."""

    native.load(tmp_path / "native")  # says that it compiles, where it is the first in its process

    def run(topics: str) -> str:
        capfd.readouterr()
        with settings.override(debug=topics, cache_dir=str(tmp_path)):
            explain(product, torch.ones(2, 3), torch.ones(3, 2), dynamic=False)
        return capfd.readouterr().err

    return run


def test_topics_print_what_they_name(printed):
    assert printed("") == ""
    assert "x: float32[2, 3] = input" in printed("graph").replace("l_x_", "x")
    assert "remove_noops, 1 edits" in printed("passes")
    placement = printed("placement")
    assert "mm: aten.mm float32[2, 2]: kernel" in placement
    assert "view" not in placement.replace(".view(-1)", "")
    both = printed("passes, placement")
    assert "dlinfer passes" in both
    assert "dlinfer placement" in both
    everything = printed("all")
    assert all(f"dlinfer {topic}:" in everything for topic in ("graph", "passes", "placement"))


def test_a_rule_that_nearly_matched_says_why(capfd, tmp_path):
    def norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(mean + 1e-6)), mean

    with settings.override(debug="passes", cache_dir=str(tmp_path)):
        explanation = explain(norm, torch.ones(2, 8), torch.ones(8), dynamic=False)
    said = "refused at mul: output, outside the pattern, uses mean"
    for text in (capfd.readouterr().err, explanation.to_text()):
        assert [said in line for line in text.splitlines()].count(True) == 1


def test_the_cache_says_what_happens_to_an_entry(capfd, tmp_path):
    from dlinfer.graph.cache.disk import ArtifactCache
    from dlinfer.graph.cache.fingerprint import environment
    from dlinfer.graph.cache.key import Key

    key = Key("test", "a subject", environment())
    cache = ArtifactCache(tmp_path, "test")
    with settings.override(debug="cache"):
        cache.load(key, str)
        cache.store(key, lambda: b"value")
        cache.load(key, str)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("dlinfer cache")]
    missed = [f"dlinfer cache: {what}" for what in ("missed", f"why {key.name} was missed")]
    assert said == [*missed, "dlinfer cache: stored", "dlinfer cache: hit"]


def test_a_topic_that_does_not_exist_is_refused():
    assert settings.from_environment({"DLINFER_DEBUG": "graph, all"}).debug == "graph, all"
    with pytest.raises(SettingError, match="a comma-separated list of graph, passes, placement, cache, all"):
        settings.from_environment({"DLINFER_DEBUG": "graph,plaecment"})


def test_results_are_shown_with_dtype_and_sizes():
    assert describe(torch.empty(2, 3, dtype=torch.bfloat16)) == "bfloat16[2, 3]"
    assert describe((torch.empty(1), 4)) == "(float32[1], 4)"
