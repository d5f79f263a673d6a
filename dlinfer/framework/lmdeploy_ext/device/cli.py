"""LMDeploy's command line accepts our device types: ``lmdeploy serve api_server PATH --device NAME``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.devices import OWN, served
from dlinfer.framework.patching import Patch


def _device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def device(parser: Any, default: str = "cuda", choices: Sequence[str] = OWN) -> Any:
        return original(parser, default, [*choices, *(name for name in served() if name not in choices)])

    return device


PATCHES = (
    Patch(
        target="lmdeploy.cli.utils:ArgumentHelper.device",
        why="the choices of --device are a closed list",
        signature="(parser, default='cuda', choices=['cuda', 'ascend', 'maca', 'camb'])",
        build=_device,
        essential=False,
    ),
)
