"""Checkpoints of models that transformers has under another name: their configuration is code (``trust_remote_code``).

Intern-S1 is InternVL around a Qwen3-MoE, and Intern-S2-Preview is Qwen3.5-MoE: the same networks with the same names of
weights. What differs is config.json. Intern-S2-Preview has a part for time series too, whose weights LMDeploy passes
over.
"""

import json
import shutil
from pathlib import Path

CONFIGURATION = '''"""Configuration of a tiny {architecture}."""

from transformers import WhisperConfig, {base}Config


class Config({base}Config):
    model_type = "{model_type}"

    def __post_init__(self, ts_config=None, **kwargs):
        if ts_config is not None:
            self.ts_config = WhisperConfig(**ts_config)
        super().__post_init__(**kwargs)
'''

TIME_SERIES = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "ts_adapt_in_dim": 256,
    "ts_adapt_out_dim": 32,
    "ts_hidden_dim": 32,
    "out_hidden_size": 64,
}


def save(folder: Path, reference: Path, architecture: str, model_type: str) -> None:
    """Write to ``folder`` the checkpoint in ``reference`` as another class, whose configuration is code."""
    for file in reference.iterdir():
        shutil.copy(file, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    base = config["architectures"][0].removesuffix("ForConditionalGeneration")
    config |= {
        "architectures": [architecture],
        "model_type": model_type,
        "auto_map": {"AutoConfig": "configuration_remote.Config"},
    }
    if model_type == "intern_s2_preview":
        config["ts_config"] = TIME_SERIES
    file.write_text(json.dumps(config, indent=2) + "\n")
    code = CONFIGURATION.format(architecture=architecture, base=base, model_type=model_type)
    (folder / "configuration_remote.py").write_text(code)
