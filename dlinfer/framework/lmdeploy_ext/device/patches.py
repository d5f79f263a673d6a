"""The places in LMDeploy's engine that name a device outside the reach of the device view."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch


def _torch_check(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def check(self: Any) -> None:
        if activation.active() is not None:
            self.device = activation.torch_device()
        original(self)

    return check


def _agent_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if activation.active() is not None:
            self.device = activation.torch_device()
            proposer = self.spec_agent.proposer
            for owner in (self.spec_agent, proposer):
                if owner is not None:
                    owner.device = activation.torch_device()

    return __init__


def _to_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _try_to_cuda(val: Any, non_blocking: bool = False) -> Any:
        if activation.active() is None or val is None:
            return original(val, non_blocking)
        device = activation.torch_device()
        if isinstance(val, torch.Tensor):
            return val.to(device, non_blocking=non_blocking)
        return val.to_device(device, non_blocking=non_blocking)

    return _try_to_cuda


def _bmm(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def forward(self: Any, x: torch.Tensor, output: torch.Tensor) -> None:
        """x [N, H, in] and output [N, H, out], which is written. A graph takes no ``out`` with gaps."""
        if activation.active() is None:
            original(self, x, output)
        else:
            output.copy_(torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1))

    return forward


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.check_env.torch:TorchChecker.check",
        why="tries torch on 'cuda', whatever device was chosen",
        signature="(self)",
        build=_torch_check,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.__init__",
        why="sets self.device = 'cuda', from where it reaches every weight of the model and of a draft model",
        signature="(self, model_path, model_config, cache_config, backend_config, misc_config, dist_ctx, "
        "device_ctx, adapters=None, specdecode_config=None, trust_remote_code=False)",
        build=_agent_init,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.model_agent.agent:_try_to_cuda",
        why="moves each batch of inputs by Tensor.cuda()",
        signature="(val, non_blocking=False)",
        build=_to_device,
    ),
    Patch(
        target="lmdeploy.pytorch.models.deepseek_v2:DeepseekV2BMM.forward",
        why="writes torch.bmm into a transposed tensor, which Dynamo cannot capture",
        signature="(self, x, output)",
        build=_bmm,
    ),
)
