"""Configurations as the checkpoints of Phi-3.5-MoE and MiniCPM3 were released with them.

transformers 5 reads these and saves others: the class has another name, rope parameters stand under another key with
``rope_type`` for ``type``, and what can be told from other fields is written out.
"""

import json
from pathlib import Path
from typing import Any

_TOLD_BY_OTHERS = ("original_max_position_embeddings", "head_dim", "qk_head_dim", "v_head_dim", "mlp_bias")


def save(model: Any, folder: Path, architecture: str) -> None:
    """Write weights, and config.json in its first form with the class name that LMDeploy knows.

    model: a transformers model of one set of rope parameters, whose value heads are as wide as a head's share.
    """
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    for name in _TOLD_BY_OTHERS:
        config.pop(name, None)
    config["architectures"] = [architecture]
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    file.write_text(json.dumps(config, indent=2) + "\n")
