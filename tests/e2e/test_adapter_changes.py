"""LoRA adapters that a running engine loads and unloads say what PEFT says, in float32, and change nobody else."""

from typing import Any

import pytest

from tests.e2e import test_adapters
from tests.e2e.harness import EngineRun, Lab
from tests.e2e.test_adapters import ATTENTION, MLP, NEW, PROMPTS, Case

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

ADAPTERS: dict[str, list[Any]] = {
    "first": [ATTENTION + MLP, 4, 8],
    "second": [["q_proj", "v_proj", "down_proj"], 8, 4, {"rank_pattern": {"v_proj": 3}, "use_rslora": True}],
    "third": [["k_proj", "o_proj", "gate_proj"], 5, 10],
}
# Room for the second and the third, or for two of the second.
ROWS = {"DLINFER_CPU_ADAPTER_ROWS": "16"}


def ask(name: str, *who: str, **more: Any) -> dict[str, Any]:
    """Each prompt by each adapter of ``who``, all at once."""
    return {
        "name": name,
        "kind": "token_ids_of",
        "prompts": [prompt for prompt in PROMPTS for _ in who],
        "adapters": [adapter or None for _ in PROMPTS for adapter in who],
        "gen": {"max_new_tokens": NEW, "ignore_eos": True},
    } | more


def load(name: str, adapter: str, folder: str | None) -> dict[str, Any]:
    return {"name": name, "kind": "change_adapter", "adapter": adapter, "folder": folder}


def expect(run: EngineRun, name: str, case: Case, *who: str) -> None:
    wanted = [case.said[adapter][number] for number in range(len(PROMPTS)) for adapter in who]
    assert run.tokens(name) == wanted, name


@pytest.mark.parametrize("mode", ["eager", "graphs", pytest.param("openvino", marks=pytest.mark.full)])
def test_adapters_that_come_and_go(mode: str, lab: Lab) -> None:
    environment = ROWS | ({"DLINFER_ENGINE": "openvino"} if mode == "openvino" else {})
    with test_adapters.made(lab, "llama", ADAPTERS) as case:
        first, second, third = (case.adapters[name] for name in ADAPTERS)
        replace = [["second", None], ["second", third]]
        steps = [
            ask("one", "", "first"),
            load("load", "second", second),
            ask("two", "", "first", "second"),
            ask("again", "", "first", "second"),
            load("twice", "second", third),
            ask("meanwhile", "", "first", "second", changes=replace, after=NEW // 2),
            ask("replaced", "", "first", "second"),
            load("gone", "first", None),
            ask("two left", "", "second"),
            ask("refused", "first"),
            load("gone again", "first", None),
            load("room of another", "long", second),
            ask("three", "", "second", "long"),
            load("no room", "more", second),
            load("nowhere", "more", str(case.folder / "nowhere")),
            load("in the rest", "first", third),
            ask("all", "", "first", "second", "long"),
        ]
        options = {"dtype": "float32", "enable_prefix_caching": True, "adapters": {"first": first}}
        run = lab.engine(case.model, steps, eager_mode=mode == "eager", environment=environment, **options)
    expect(run, "one", case, "", "first")
    for name in ("two", "again", "meanwhile"):
        expect(run, name, case, "", "first", "second")
    assert max(response["cached_tokens"] for response in run["again"]) > 0
    expect(run, "replaced", case, "", "first", "third")
    expect(run, "two left", case, "", "third")
    assert {response.get("refused") for response in run["refused"]} == {
        "There is no adapter 'first'. Loaded adapters: second."
    }
    expect(run, "three", case, "", "third", "second")
    expect(run, "all", case, "", "third", "third", "second")
    assert run["load"] == run["gone"] == run["room of another"] == run["in the rest"] == ""
    assert "cannot load the LoRA adapter 'second': an adapter of this name is loaded" in run["twice"]
    assert "cannot unload the LoRA adapter 'first': no adapter has this name" in run["gone again"]
    assert "its rank is 8, and 7 reserved rows are free" in run["no room"]
    assert "there is no such folder" in run["nowhere"]
    if mode != "eager":
        assert run["graphs"]["late"] == 0
        assert {found for _, found, _ in run["graphs"]["phases"]} <= {"compiled", "loaded"}
