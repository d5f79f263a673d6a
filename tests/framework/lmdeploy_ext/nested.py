"""Classes of LMDeploy's whose configuration alone does not tell what they are: the language model is named inside."""

from typing import Any

NESTED: dict[str, dict[str, Any]] = {
    "DeepseekVLV2ForCausalLM": {
        "language_config": {"architectures": ["DeepseekV2ForCausalLM"]},
        "vision_config": {"model_type": "vision"},
    }
}
"""Class -> what else its configuration has."""
