"""MXFP4 checkpoints of gpt-oss: experts in 4-bit floats, which a layer of ours keeps packed.

OCP Microscaling Formats specification 1.0, as gpt-oss stores it. Of each projection of the experts: ``..._blocks``
uint8 [experts, out, in / 32, 16], two numbers E2M1 in a byte, the first in the lower half; ``..._scales`` uint8
[experts, out, in / 32], powers of two by E8M0. All else is in 16 bits. LMDeploy knows no such method, so that it is
given a model in floats; the layer of experts is made by ``layers/moe``, and takes those tensors as they are.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.conversion.checkpoint import Checkpoint, Plan


def plan(config: Mapping[str, Any], model: Mapping[str, Any]) -> Plan:
    """The plan of a gpt-oss checkpoint, whose tensors stay. Raises UnsupportedFeatureError for another model."""
    checkpoint = Checkpoint("mxfp4", config, model)
    checkpoint.require(model.get("model_type") == "gpt_oss", "in another model than gpt-oss")
    return Plan(None, _kept)


def _kept(name: str, tensor: Tensor, layer: Any) -> Iterable[tuple[str, Tensor]]:
    yield name, tensor
