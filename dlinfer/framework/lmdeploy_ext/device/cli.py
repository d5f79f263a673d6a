"""LMDeploy's command line accepts our device types: ``lmdeploy serve api_server PATH --device NAME``."""

from collections.abc import Sequence
from typing import Any

from dlinfer.framework.lmdeploy_ext.device.devices import OWN, served
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.cli.utils:ArgumentHelper.device",
    why="the choices of --device are a closed list",
    signature="(parser, default='cuda', choices=['cuda', 'ascend', 'maca', 'camb'])",
    essential=False,
)
def _device(original: Original, parser: Any, default: str = "cuda", choices: Sequence[str] = OWN) -> Any:
    return original(parser, default, [*choices, *(name for name in served() if name not in choices)])
