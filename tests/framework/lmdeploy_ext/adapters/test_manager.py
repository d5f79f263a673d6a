"""Adapters of a running engine: names, keys, numbers and rows, and the errors of changes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlinfer import settings
from dlinfer.errors import AdapterChangeError, AdapterFolderError, UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.adapters.manager import AdapterManager, change
from dlinfer.framework.lmdeploy_ext.stepping.step_thread import StepThread
from tests.framework.lmdeploy_ext.adapters.adapter_models import LlamaForCausalLM, added, build, check, save

SCALING = {"gate_proj": 2.0}


class Engine:
    """What ``change`` sees of LMDeploy's engine: a model of two layers, and the sequences that run."""

    def __init__(self, adapters: dict[str, str], reserved: int = 6) -> None:
        self.engine_config = SimpleNamespace(device_type="cpu", adapters=dict(adapters))
        self.model = build(adapters)
        self.adapter_manager = AdapterManager(adapters, reserved)
        patched = SimpleNamespace(get_model=lambda: self.model)
        self.executor = SimpleNamespace(model_agent=SimpleNamespace(patched_model=patched))
        self.running: list[Any] = []
        self.scheduler = SimpleNamespace(get_sessions=lambda: self.running)

    def run(self, *names: str) -> None:
        """Let one sequence run for each adapter named, and no others."""
        keys = [self.adapter_manager.keys[name] for name in names]
        self.running = [SimpleNamespace(sequences={0: SimpleNamespace(adapter_name=key)}) for key in keys]

    def numbers(self) -> list[int]:
        """The numbers of the adapters of running sequences."""
        return self.adapter_manager.get_adapter_ids([each.sequences[0].adapter_name for each in self.running])

    def number(self, name: str) -> int:
        return self.adapter_manager.get_adapter_ids([self.adapter_manager.keys[name]])[0]

    def change(self, name: str, folder: str | None) -> None:
        asyncio.run(change(self, name, folder))


@pytest.fixture
def folders(tmp_path):
    return {name: save(tmp_path / name, seed, {"gate_proj": 3}) for seed, name in enumerate("abcd")}


@pytest.fixture
def engine(folders):
    with settings.override(cpu_adapter_rows=6):
        yield Engine({"a": folders["a"]})


def test_names_come_and_go(engine, folders):
    engine.change("b", folders["b"])
    engine.change("c", folders["c"])
    assert engine.engine_config.adapters == {name: folders[name] for name in "abc"}
    for name in "abc":
        check(engine.model, engine.number(name), folders[name], SCALING)
    with pytest.raises(AdapterChangeError, match="its rank is 3, and 0 reserved rows are free"):
        engine.change("d", folders["d"])
    engine.change("b", None)
    assert sorted(engine.engine_config.adapters) == ["a", "c"]
    engine.change("d", folders["d"])
    for name in "acd":
        check(engine.model, engine.number(name), folders[name], SCALING)
    assert engine.adapter_manager.get_adapter_ids([None]) == [0]


def test_a_running_request_keeps_its_adapter(engine, folders):
    engine.change("b", folders["b"])
    engine.run("a", "b")
    engine.change("a", None)
    engine.change("b", None)
    engine.change("b", folders["c"])  # under the name of one that runs
    first, second = engine.numbers()
    check(engine.model, first, folders["a"], SCALING)
    check(engine.model, second, folders["b"], SCALING)
    check(engine.model, engine.number("b"), folders["c"], SCALING)
    with pytest.raises(AdapterChangeError, match="wait until their requests have ended"):
        engine.change("d", folders["d"])
    engine.run("b")
    engine.change("d", folders["d"])
    check(engine.model, engine.number("b"), folders["c"], SCALING)
    check(engine.model, engine.number("d"), folders["d"], SCALING)


def test_each_load_has_a_key_of_its_own(engine, folders):
    """Sequences of an earlier adapter of the same name share no blocks of the prefix cache."""
    keys = {engine.adapter_manager.keys["a"]}
    for name in "abcd":
        engine.change("a", None)
        engine.change("a", folders[name])
        keys.add(engine.adapter_manager.keys["a"])
    assert len(keys) == 5


def test_a_sequence_that_ended_before_its_step_was_prepared(engine):
    assert engine.adapter_manager.get_adapter_ids(["a@7"]) == [0]


def test_names_that_cannot_be_changed(engine, folders):
    for name, folder, words in (
        ("a", folders["b"], "cannot load the LoRA adapter 'a': an adapter of this name is loaded"),
        ("b", None, "cannot unload the LoRA adapter 'b': no adapter has this name"),
    ):
        with pytest.raises(AdapterChangeError, match=words):
            engine.change(name, folder)
    with pytest.raises(AdapterFolderError, match="there is no such folder"):
        engine.change("b", folders["b"] + "x")
    assert sorted(engine.engine_config.adapters) == ["a"]
    assert not any(added(engine.model, number) for number in range(2, 8))


def test_dora_is_loaded_at_start_only(engine, tmp_path):
    folder = save(tmp_path / "dora", 5, {"gate_proj": 3}, use_dora=True)
    with pytest.raises(AdapterFolderError, match="it uses DoRA, and such adapters are loaded at start only"):
        engine.change("b", folder)
    assert Engine({"b": folder}).number("b") == 1


def test_nothing_changes_without_reserved_rows(folders):
    engine = Engine({"a": folders["a"]}, 0)
    for name, folder in (("b", folders["b"]), ("a", None)):
        with pytest.raises(AdapterChangeError, match=r"start the engine .* with DLINFER_CPU_ADAPTER_ROWS"):
            engine.change(name, folder)
    assert engine.adapter_manager.num_adapters() == 2
    assert AdapterManager({}, 0).num_adapters() == 1


def test_a_class_that_is_not_served(engine, folders):
    engine.model = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedFeatureError, match="a LoRA adapter on Linear"):
        engine.change("b", folders["b"])


def test_rows_change_between_steps():
    """A change waits for the step that runs, and runs before the step that is ready."""
    assert LlamaForCausalLM() is not None  # makes the device active
    seen: list[str] = []

    async def step(name: str) -> None:
        seen.append(f"{name} begins")
        if name == "first":
            waiting.append(
                asyncio.run_coroutine_threadsafe(steps.between_steps(lambda: seen.append("change")), loop)
            )
            while not steps._changes:
                pass
        seen.append(f"{name} ends")

    async def run() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        following = iter([lambda: step("second"), None])
        await steps.run(lambda: step("first"), lambda: next(following))
        await asyncio.wrap_future(waiting[0])
        assert await steps.between_steps(torch.is_inference_mode_enabled)
        with pytest.raises(ZeroDivisionError):
            await steps.between_steps(lambda: 1 // 0)

    steps, waiting = StepThread(), []
    loop: Any = None
    asyncio.run(run())
    steps.close()
    assert seen == ["first begins", "first ends", "change", "second begins", "second ends"]
