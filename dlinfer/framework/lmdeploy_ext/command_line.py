"""Patches LMDeploy's command line. ``--device`` activates our device, and our errors print without a traceback."""

import logging
import sys
from collections.abc import Iterable
from typing import Any

from dlinfer.errors import DlinferError
from dlinfer.framework.lmdeploy_ext.device import activation, vendor_devices
from dlinfer.framework.lmdeploy_ext.errors import NoCudaError
from dlinfer.framework.lmdeploy_ext.gguf import folder as gguf
from dlinfer.framework.lmdeploy_ext.gguf.reader import is_gguf
from dlinfer.framework.patching import Original, replaces

logger = logging.getLogger("dlinfer")


@replaces(
    "lmdeploy.cli.utils:FlexibleArgumentParser.parse_args",
    why="returns before the device is chosen, and the command line then looks for the model before it creates the "
    "engine config; does not know GGUF files",
    essential=False,
)
def _parse_args(original: Original, self: Any, args: Any = None, namespace: Any = None) -> Any:
    parsed = original(self, args, namespace)
    device_type = getattr(parsed, "device", None)
    # LMDeploy's quantisation commands have no ``--backend`` option.
    if device_type == "cuda" and hasattr(parsed, "backend"):
        arguments = sys.argv[1:] if args is None else args
        if vendor_devices.lacks_cuda(device_type) and _names_device(arguments):
            raise NoCudaError
        device_type = parsed.device = vendor_devices.without_cuda(device_type)
    if device_type is not None:
        vendor_devices.check_vendor(device_type)
        if activation.serves(device_type):
            activation.activate(device_type)
            _serve_gguf(parsed)
    return parsed


def _serve_gguf(parsed: Any) -> None:
    """Replace the path of a GGUF file by that of its model folder. The server's model keeps the name of the file."""
    path = getattr(parsed, "model_path", None)
    if path is not None and is_gguf(path):
        parsed.model_path = str(gguf.model_folder(path))
        if getattr(parsed, "model_name", path) is None:
            parsed.model_name = path


def _names_device(arguments: Iterable[str]) -> bool:
    """Return whether the arguments contain ``--device`` or an abbreviation that argparse reads as ``--device``."""
    names = (argument.partition("=")[0] for argument in arguments)
    return any(len(name) > len("--d") and "--device".startswith(name) for name in names)


@replaces(
    "lmdeploy.cli.entrypoint:run",
    why="shows the user a traceback instead of the error alone",
    essential=False,
)
def _run(original: Original) -> None:
    try:
        original()
    except DlinferError as error:
        logger.debug("traceback of the error:", exc_info=True)
        sys.exit(f"lmdeploy: error: {error}")
