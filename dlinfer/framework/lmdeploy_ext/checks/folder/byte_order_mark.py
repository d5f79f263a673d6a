"""A config.json that begins with a byte-order mark, as some editors write it, is read as if it had none."""

import codecs
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlinfer.framework.patching import Patch, PatchSet


def _dict_from_json_file(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(original)
    def _dict_from_json_file(cls: Any, json_file: Any) -> dict[str, Any]:
        content = Path(json_file).read_bytes()
        if not content.startswith(codecs.BOM_UTF8):
            return original(cls, json_file)
        return cls._decode_special_floats(json.loads(content.decode("utf-8-sig")))

    return _dict_from_json_file


OF_TRANSFORMERS = PatchSet(
    "transformers",
    [
        Patch(
            target="transformers.configuration_utils:PreTrainedConfig._dict_from_json_file",
            why="takes a byte-order mark for a fault of the JSON behind it",
            signature="(cls, json_file)",
            build=_dict_from_json_file,
            essential=False,
        )
    ],
)
"""Patches on transformers, which reads every configuration by this method. Applied where LMDeploy is imported."""
