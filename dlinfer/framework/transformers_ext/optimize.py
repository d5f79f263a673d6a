"""``optimize(model)``: make modules of a model run on the fused ops. The change can be undone."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dlinfer.framework.transformers_ext import experts
from dlinfer.framework.transformers_ext.forward import (
    PLAN,
    experts_forward,
    fused_forward,
    linear_forward,
    make_plan,
)
from dlinfer.framework.transformers_ext.fuse import (
    Fused,
    NotFused,
    fuse,
    one_argument,
    refuse_weights,
)


@dataclass(frozen=True)
class Swapped:
    """A module whose forward was replaced.

    name: the module's path in the model. module: the name of its class. ops: the ops that its new forward calls.
    """

    name: str
    module: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """A module that was examined and not changed.

    name: the module's path in the model. module: the name of its class. reason: why it was not changed.
    """

    name: str
    module: str
    reason: str


class Optimization:
    """The result of ``optimize``: the replaced modules and the modules that were kept.

    ``str`` returns one line for each class, with the ops that its modules call, or with the reason why they were kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.swapped: list[Swapped] = []
        self.kept: list[Kept] = []

    def undo(self) -> None:
        """Give each replaced module the forward of its class back. A second call does nothing."""
        for swapped in self.swapped:
            module = self._model.get_submodule(swapped.name)
            module.__dict__.pop("forward", None)
            module.__dict__.pop(PLAN, None)
        self.swapped = []

    def __str__(self) -> str:
        ran = Counter((entry.module, ", ".join(entry.ops)) for entry in self.swapped)
        left = Counter((entry.module, entry.reason) for entry in self.kept)
        lines = [f"{count} x {name}: {what}" for (name, what), count in ran.items()]
        lines += [f"{count} x {name} kept: {why}" for (name, why), count in left.items()]
        return "\n".join(lines) or "the model has no modules to optimize"


def optimize(model: nn.Module) -> Optimization:
    """Make the modules of a Hugging Face model run on dlinfer's ops. The model is changed in place.

    - The forward of a small module with one input tensor, such as a norm or a gated MLP, is traced. It is replaced if
      the fusion passes of graph mode find a fused op in the trace.
    - Experts that transformers' ExpertsInterface dispatches run on ``fused_moe``.
    - Linear layers that are not inside a replaced module run on ``linear``.

    Replaced modules keep their class, their names and the tensors of their weights.

    In some cases a replaced module runs the forward of its class, under the fallback policy. These cases are training,
    autocast, inputs of another dtype than the weights, and a change to its children. Calls that record gradients raise
    InferenceOnlyError.

    The result lists the replaced modules, and each module that was left unchanged, with the reason. Its ``undo()``
    restores the model.
    """
    done = Optimization(model)
    known: dict[Any, Fused | NotFused] = {}
    layers: list[tuple[str, nn.Linear]] = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            layers.append((name, module))
        if type(module).__module__.startswith("torch.nn."):
            continue
        is_experts = experts.are_dispatched(module)
        if not is_experts and (one_argument(module) is None or not _is_small(module)):
            continue
        kind = type(module).__name__
        try:
            _refuse_changed(module)
            if is_experts:
                experts.refuse_others(module)
                _swap(name, module, None)
                done.swapped.append(Swapped(name, kind, ("fused_moe",)))
                continue
            fused = _fused(module, known)
        except NotFused as refused:
            done.kept.append(Kept(name, kind, str(refused)))
            continue
        _swap(name, module, fused)
        done.swapped.append(Swapped(name, kind, fused.ops))
    _swap_linears(model, layers, done)
    return done


def _swap_linears(model: nn.Module, layers: list[tuple[str, nn.Linear]], done: Optimization) -> None:
    """Replace the forwards of linear layers. Layers inside modules that were replaced as a whole are left alone."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if PLAN in module.__dict__)
    for name, module in layers:
        if name.startswith(inside):
            continue
        try:
            _refuse_changed(module)
            refuse_weights(dict(module.named_parameters()))
        except NotFused as refused:
            done.kept.append(Kept(name, "Linear", str(refused)))
            continue
        _swap(name, module, None)
        done.swapped.append(Swapped(name, "Linear", ("linear",)))


def _is_small(module: nn.Module) -> bool:
    """Return whether a module has weights and no grandchildren."""
    children = list(module.children())
    return (
        not any(list(child.children()) for child in children) and next(module.parameters(), None) is not None
    )


def _refuse_changed(module: nn.Module) -> None:
    if PLAN in module.__dict__:
        raise NotFused("it already runs on dlinfer's ops")
    if "forward" in module.__dict__:
        raise NotFused("its forward was replaced by other code")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    if any(getattr(child, name) for child in module.modules() for name in hooks):
        raise NotFused("it has hooks")


def _swap(name: str, module: nn.Module, fused: Fused | None) -> None:
    setattr(module, PLAN, make_plan(name, module, fused))
    forward = fused_forward if fused else linear_forward if isinstance(module, nn.Linear) else experts_forward
    module.forward = partial(forward, module)


def _fused(module: nn.Module, known: dict[Any, Fused | NotFused]) -> Fused:
    key = _key(module)
    if key not in known:
        with torch.no_grad():
            try:
                known[key] = fuse(module)
            except NotFused as refused:
                known[key] = refused
    result = known[key]
    if isinstance(result, NotFused):
        raise NotFused(*result.args)
    return result


def _key(module: nn.Module) -> Any:
    """Return a key. If two modules have equal keys, one graph serves both.

    The key holds classes, numbers and texts, the identities of all other attributes, and the layouts of weights.
    """
    parts: list[Any] = []
    for name, child in module.named_modules():
        parts.append((name, type(child)))
        for attribute, value in sorted(vars(child).items()):
            if attribute.startswith("_") or isinstance(value, nn.Module):
                continue
            plain = isinstance(value, (int, float, str, bool, type(None)))
            parts.append((attribute, value if plain else id(value)))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    parts += [
        (name, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for name, tensor in tensors
    ]
    return tuple(parts)
