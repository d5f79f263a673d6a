"""LMDeploy's command line accepts our device types: ``lmdeploy serve api_server PATH --device cpu``."""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.framework.lmdeploy_ext.devices import SERVED
from dlinfer.framework.patching import Patch


def _device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def device(parser: Any, default: str = "cuda", choices: tuple[str, ...] | list[str] | None = None) -> Any:
        own = list(choices) if choices is not None else list(original.__defaults__[1])
        return original(parser, default, own + [name for name in SERVED if name not in own])

    return device


PATCHES = (
    Patch(
        target="lmdeploy.cli.utils:ArgumentHelper.device",
        why="the choices of --device are a closed list",
        signature="(parser, default='cuda', choices=['cuda', 'ascend', 'maca', 'camb'])",
        build=_device,
    ),
)
