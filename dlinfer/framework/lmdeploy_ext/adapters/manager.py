"""Loads and unloads the LoRA adapters of a running engine.

Every LoRA layer reserves rows at start (DLINFER_CPU_ADAPTER_ROWS). A loaded adapter gets a number and a block of rows,
the same in all layers. A load first closes the gaps between blocks. Only values of tensors change, so compiled graphs
stay valid.

Each load has a key of its own, which its sequences carry as LMDeploy's ``adapter_name``. LMDeploy's prefix cache keeps
the blocks of different keys apart. An adapter that is loaded under an earlier name thus never reads the blocks of its
predecessor.

A name that is unloaded is gone for new requests. Requests that run keep their adapter. Its number and rows are free
when no sequence has its key any more.
"""

import asyncio
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dlinfer.errors import AdapterChangeError
from dlinfer.framework.lmdeploy_ext.adapters import layers
from dlinfer.framework.lmdeploy_ext.checks.model.adapters import Adapter, check_model
from dlinfer.framework.lmdeploy_ext.device import activation, devices
from dlinfer.framework.lmdeploy_ext.stepping.step_thread import steps_of
from dlinfer.framework.patching import Original, replaces

_BASE = layers.Place(number=0, start=0, rows=0)


class AdapterManager:
    """Replaces LMDeploy's class of this name: the numbers of an engine's adapters.

    keys: name -> key of the adapter's sequences. None stands for the base model, in both.
    """

    def __init__(self, adapters: Mapping[str, str], reserved: int) -> None:
        """adapters: name -> folder of the adapters given at start. reserved: rows for further adapters."""
        self.keys: dict[str | None, str | None] = {None: None}
        self.changing = asyncio.Lock()
        self._places: dict[str | None, layers.Place] = {None: _BASE}
        self._loads = 0
        for place, name in zip(layers.places(adapters), sorted(adapters), strict=True):
            self.add(name, f"{name}@0", place)
        self._rows = max(place.end for place in self._places.values()) + reserved
        self._numbers = len(self._places) + reserved

    def get_adapter_ids(self, keys: Sequence[str | None]) -> list[int]:
        """Return the numbers of the adapters with these keys.

        A key may be forgotten if its sequence has just ended. Nobody reads the results of such a sequence.
        """
        return [self._places.get(key, _BASE).number for key in keys]

    def num_adapters(self) -> int:
        """Return the highest possible number of adapters, with the base model.

        LMDeploy leaves adapter ids out of a step's inputs if this is 1.
        """
        return self._numbers

    def add(self, name: str, key: str, place: layers.Place) -> None:
        """Serve requests for ``name`` by the adapter with this key and place."""
        self.keys[name], self._places[key] = key, place

    def new_key(self, name: str) -> str:
        """Return a key that no load of this engine has had."""
        self._loads += 1
        return f"{name}@{self._loads}"

    def forget(self, running: Collection[str | None]) -> None:
        """Free the places of unloaded adapters that no sequence uses. running: the keys of all sequences."""
        used = {*running, *self.keys.values()}
        self._places = {key: place for key, place in self._places.items() if key in used}

    def free_rows(self) -> int:
        """Return how many rows no adapter has."""
        return self._rows - sum(place.rows for place in self._places.values())

    def free_number(self) -> int:
        """Return the smallest number that no adapter has."""
        numbers = {place.number for place in self._places.values()}
        return next(number for number in range(self._numbers) if number not in numbers)

    def close_gaps(self) -> list[tuple[layers.Place, layers.Place]]:
        """Move all places to the front, in order. Return (old place, new place) of each, for ``layers.move``."""
        moves: list[tuple[layers.Place, layers.Place]] = []
        begin = 0
        for key, place in sorted(self._places.items(), key=lambda item: item[1].start):
            self._places[key] = dataclasses.replace(place, start=begin)
            moves.append((place, self._places[key]))
            begin += place.rows
        return moves


async def change(engine: Any, name: str, folder: str | None) -> None:
    """Load the adapter in a folder under a name, or unload it if ``folder`` is None. engine: LMDeploy's Engine.

    Raises AdapterChangeError if the name or the number of free rows does not allow it, AdapterFolderError if the
    adapter cannot be served, and UnsupportedFeatureError if the model serves no adapters.
    """
    manager: AdapterManager = engine.adapter_manager
    verb = "load" if folder is not None else "unload"
    if not devices.reserved_rows(engine.engine_config.device_type):
        raise AdapterChangeError(
            change=verb,
            name=name,
            detail="this engine has the adapters that it was started with",
            advice="start the engine on device cpu with DLINFER_CPU_ADAPTER_ROWS (docs/guides/adapters.md)",
        )
    async with manager.changing:
        if folder is not None:
            await _load(engine, manager, name, folder)
        elif name is None or name not in manager.keys:
            loaded = ", ".join(sorted(filter(None, manager.keys))) or "none"
            raise AdapterChangeError(
                change=verb, name=name, detail="no adapter has this name", advice=f"loaded adapters: {loaded}"
            )
        else:
            del manager.keys[name]
            engine.engine_config.adapters.pop(name, None)


async def _load(engine: Any, manager: AdapterManager, name: str, folder: str) -> None:
    if name in manager.keys:
        raise AdapterChangeError(
            change="load", name=name, detail="an adapter of this name is loaded", advice="unload it first"
        )
    adapter = Adapter(name, folder)
    agent = engine.executor.model_agent
    model = agent.patched_model.get_model()
    await asyncio.to_thread(check_model, model, {name: folder})
    rows = adapter.rows()
    sessions = engine.scheduler.get_sessions()
    manager.forget({each.adapter_name for session in sessions for each in session.sequences.values()})
    if rows > manager.free_rows():
        raise AdapterChangeError(
            change="load",
            name=name,
            detail=f"its rank is {rows}, and {manager.free_rows()} reserved rows are free",
            advice="unload adapters, wait until their requests have ended, or raise DLINFER_CPU_ADAPTER_ROWS",
        )
    parts = adapter.layers_of(model)
    if any(part.is_dora for part in parts.values()):
        raise adapter.fault(
            "it uses DoRA, and such adapters are loaded at start only", "give it to --adapters"
        )
    weights = await asyncio.to_thread(lambda: list(adapter.weights_of(model)))

    def write() -> layers.Place:
        moves = manager.close_gaps()
        layers.move(model, moves)
        place = layers.Place(manager.free_number(), max(new.end for _, new in moves), rows)
        layers.write(model, place, parts, weights)
        return place

    steps = steps_of(agent)
    assert steps is not None, "rows are reserved only on the host, which computes synchronously"
    place = await steps.between_steps(write)
    manager.add(name, manager.new_key(name), place)
    engine.engine_config.adapters[name] = folder


@replaces(
    "lmdeploy.pytorch.engine.engine:Engine._build_adapter_manager",
    why="numbers the adapters once, at start",
    when=activation.is_on,
)
def build_adapter_manager(
    original: Original, self: Any, adapters: Mapping[str, str] | None
) -> AdapterManager:
    return AdapterManager(adapters or {}, devices.reserved_rows(activation.active()))
