"""Read a config.json that begins with a byte-order mark, as some editors write it."""

import codecs
import json
from pathlib import Path
from typing import Any

from dlinfer.framework.patching import Original, PatchSet, replaces


@replaces(
    "transformers.configuration_utils:PreTrainedConfig._dict_from_json_file",
    why="reports a byte-order mark as a fault of the JSON behind it",
    essential=False,
)
def dict_from_json_file(original: Original, cls: Any, json_file: Any) -> dict[str, Any]:
    content = Path(json_file).read_bytes()
    if not content.startswith(codecs.BOM_UTF8):
        return original(cls, json_file)
    return cls._decode_special_floats(json.loads(content.decode("utf-8-sig")))


OF_TRANSFORMERS = PatchSet("transformers", [dict_from_json_file])
"""The patch on transformers' reader of every config.json. The import of LMDeploy applies the patch."""
