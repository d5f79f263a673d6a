"""Patches functions of LMDeploy where "cuda" must become the active device, but the device view cannot translate it.

The device view (``view.py``) replaces ``torch`` in LMDeploy's modules.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.device.devices import OWN, served
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.check_env.torch:TorchChecker.check",
    why="tests torch on 'cuda', whatever device was chosen",
    when=activation.is_on,
)
def check(original: Original, self: Any) -> None:
    self.device = activation.torch_device()
    original(self)


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.__init__",
    why="sets self.device to 'cuda', where all weights of the model and of a draft model are then created",
    when=activation.is_on,
    signature="(self, model_path, model_config, cache_config, backend_config, misc_config, dist_ctx, device_ctx, "
    "adapters=None, specdecode_config=None, trust_remote_code=False)",
)
def agent_init(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for owner in (self, self.spec_agent, self.spec_agent.proposer):
        if owner is not None:
            owner.device = activation.torch_device()


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:_try_to_cuda",
    why="moves each batch of inputs with Tensor.cuda()",
    when=activation.is_on,
)
def to_device(original: Original, val: Any, non_blocking: bool = False) -> Any:
    if val is None:
        return original(val, non_blocking)
    move = val.to if isinstance(val, torch.Tensor) else val.to_device
    return move(activation.torch_device(), non_blocking=non_blocking)


@replaces(
    "lmdeploy.pytorch.models.deepseek_v2:DeepseekV2BMM.forward",
    why="writes the result of torch.bmm into a transposed view, which Dynamo cannot capture",
    when=activation.is_on,
)
def bmm(original: Original, self: Any, x: torch.Tensor, output: torch.Tensor) -> None:
    """Multiply x [N, H, in] by the weight, and copy the product into ``output`` [N, H, out].

    LMDeploy instead passes a transposed view of ``output`` to ``torch.bmm`` as ``out``, which Dynamo cannot capture.
    """
    output.copy_(torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1))


@replaces(
    "lmdeploy.cli.utils:ArgumentHelper.device",
    why="allows only a fixed list of devices for --device",
    signature="(parser, default='cuda', choices=['cuda', 'ascend', 'maca', 'camb'])",
    essential=False,
)
def _device(original: Original, parser: Any, default: str = "cuda", choices: Sequence[str] = OWN) -> Any:
    return original(parser, default, [*choices, *(name for name in served() if name not in choices)])
