"""Running rules and passes on captured code the way the pipeline does: clean, fuse, clean again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dlinfer.graph.passes.cse import CSE
from dlinfer.graph.passes.dce import DCE
from dlinfer.graph.passes.pipeline import Pass, verify
from dlinfer.graph.passes.registry import RULES
from dlinfer.graph.passes.remove_noops import REMOVE_NOOPS
from dlinfer.graph.passes.rewriter import Edit
from tests.graph.passes.fakes import stale_fakes
from tests.graph.passes.fusion.capturing import CapturedGraph, captured, graph_text

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def clean(function: Callable[..., Any], *args: Any, **kwargs: Any) -> CapturedGraph:
    """A captured graph as rules meet it."""
    one = captured(function, *args, **kwargs)
    apply(one, REMOVE_NOOPS, CSE, DCE)
    return one


def apply(one: CapturedGraph, *steps: Pass) -> dict[str, int]:
    """How often each of some rules and passes fired; each must leave a valid graph."""
    fired = {}
    for step in steps:
        edits = [change for change in step.run(one.graph_module) if isinstance(change, Edit)]
        verify(one.graph_module, step.name, None)
        if edits:
            fired[step.name] = len(edits)
    assert not stale_fakes(one.graph_module)
    return fired


def fired(
    function: Callable[..., Any], *args: Any, steps: tuple[Pass, ...], dynamic: bool = True
) -> dict[str, int]:
    """How often rules fire on some code."""
    return apply(clean(function, *args, dynamic=dynamic), *steps)


def golden(one: CapturedGraph, *steps: Pass) -> str:
    """The graph before and after, as text."""
    before = graph_text(one.graph_module)
    apply(one, *steps, CSE, DCE)
    return f"{before}\n--->\n{graph_text(one.graph_module)}\n"


def changes(
    one: CapturedGraph, *steps: Pass
) -> tuple[dict[str, int], list[torch.Tensor], list[torch.Tensor]]:
    """What fired, and the results before and after."""
    want, strides = one.run(), one.strides()
    count = apply(one, *steps, CSE, DCE)
    assert one.strides() == strides
    return count, one.run(), want


def all_fired(
    function: Callable[..., Any], *args: Any
) -> tuple[dict[str, int], list[torch.Tensor], list[torch.Tensor]]:
    """``changes`` of the rules and passes that the pipeline runs."""
    return changes(clean(function, *args), *RULES)


def tiny(config: Callable[..., Any], **options: Any) -> Any:
    """A configuration of transformers with one small layer."""
    return config(**{**_SIZES, **options})


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module of transformers with weights of a size that keeps values near 1."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module.eval().to(dtype)
