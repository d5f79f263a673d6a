"""Describes a model for the disk cache of compiled calls."""

import hashlib
import inspect
from pathlib import Path
from typing import Any

import transformers
from torch import nn


def model_identity(module: nn.Module, config: Any) -> str:
    """Return a text of all that a stored graph of ``module`` depends on, except torch, dlinfer and the CPU.

    The text holds the modules' code, the transformers config, and the names, dtypes and layouts of the weights.
    """
    classes = {type(child) for child in module.modules()}
    files = sorted({inspect.getfile(kind) for kind in classes if not kind.__module__.startswith("torch.")})
    code = hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest()
    weights = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    lines = [f"transformers {transformers.__version__}", code, config.to_json_string(use_diff=False)]
    lines += sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in classes)
    lines += [f"{name} {t.dtype} {tuple(t.shape)} {t.stride()}" for name, t in weights]
    return "\n".join(lines)
