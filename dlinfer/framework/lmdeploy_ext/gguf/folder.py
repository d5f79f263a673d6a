"""Writes the model folder of a GGUF file into the user's cache, and returns it for a file that a user asks for.

The folder has config.json, generation_config.json, the tokenizer, a link to the GGUF file, and an index of weights that
names the link as the only weight file. It takes some megabytes. A file with another path, size or date gets another
folder.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.gguf import config, names, tokenizer
from dlinfer.framework.lmdeploy_ext.gguf.reader import SUFFIX, read, unusable

LINK = f"model{SUFFIX}"
"""The name of the link to the GGUF file in its model folder."""

GGUF_FILE = "gguf_file"
"""The key in the folder's config.json with the path of the GGUF file."""

_VERSION = 1  # of the folders' contents
_INDEX = "model.safetensors.index.json"  # LMDeploy looks for this name


def model_folder(path: str | os.PathLike[str]) -> Path:
    """Return the model folder of a GGUF file. Writes the folder if there is none yet.

    Raises ModelFolderError if the file cannot be served, or the folder cannot be written.
    """
    file = Path(path).absolute()
    header = read(file)
    state = file.stat()
    key = (str(file), state.st_size, state.st_mtime_ns, _VERSION, tokenizer.version())
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    folder = settings.cache_folder() / "gguf" / f"{file.stem}-{digest}"
    if (folder / _INDEX).is_file():
        return folder
    files: dict[str, Any] = {
        "config.json": config.config_of(header),
        "generation_config.json": config.generation_config_of(header),
        _INDEX: {"weight_map": dict.fromkeys(names.sources(header), LINK)},
    }
    files["config.json"][GGUF_FILE] = str(file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            tokenizer.save(header, unfinished)
            (unfinished / LINK).symlink_to(file)
            for name, content in files.items():
                (unfinished / name).write_text(json.dumps(content, indent=2) + "\n")
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if (folder / _INDEX).is_file():  # another process was faster
            return folder
        detail = f"its model folder cannot be written to {folder} ({error.strerror or error})"
        raise unusable(file, detail, "set DLINFER_CACHE_DIR to a folder that can be written") from error
    return folder
