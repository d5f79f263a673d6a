"""``optimize(model)``: which modules of a model run on the fused ops, and the way back."""

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
    """A module whose forward runs on the ops. name: its path in the model. ops: names of those that it calls."""

    name: str
    module: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Kept:
    """A module that was looked at and left as it is, and why."""

    name: str
    module: str
    reason: str


class Optimization:
    """What ``optimize`` did to a model. ``str`` gives it by class, a line each."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.swapped: list[Swapped] = []
        self.kept: list[Kept] = []

    def undo(self) -> None:
        """Give the modules back their classes' own forwards. A second call does nothing."""
        for one in self.swapped:
            module = self._model.get_submodule(one.name)
            module.__dict__.pop("forward", None)
            module.__dict__.pop(PLAN, None)
        self.swapped = []

    def __str__(self) -> str:
        ran = Counter((one.module, ", ".join(one.ops)) for one in self.swapped)
        left = Counter((one.module, one.reason) for one in self.kept)
        lines = [f"{count} x {name}: {what}" for (name, what), count in ran.items()]
        lines += [f"{count} x {name} kept: {why}" for (name, why), count in left.items()]
        return "\n".join(lines) or "nothing was looked at"


def optimize(model: nn.Module) -> Optimization:
    """Let the modules of a Hugging Face model run on dlinfer's ops where they compute what the ops compute.

    A module that takes one tensor (norms, gated MLPs) is traced as it stands, and swapped where graph mode's fusion
    passes find an op in it; experts that transformers dispatches by its ExpertsInterface run by ``fused_moe``, and
    linear layers outside of all these by ``linear``. The model is changed in place: swapped modules get a forward of
    their own, and keep their class, their names and the very tensors of their weights. Where a module is in training,
    under autocast, given other dtypes than it has, or was changed since, it runs its class's own forward, under the
    fallback policy. Calls that record gradients raise InferenceOnlyError.

    Returns what was swapped, what not and why, with ``undo()``.
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
    """Swap the linear layers that are in no module which computes them itself by now."""
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
    """Whether nothing below a module has modules below it, and it has weights."""
    children = list(module.children())
    return (
        not any(list(child.children()) for child in children) and next(module.parameters(), None) is not None
    )


def _refuse_changed(module: nn.Module) -> None:
    if PLAN in module.__dict__:
        raise NotFused("it runs on dlinfer's ops already")
    if "forward" in module.__dict__:
        raise NotFused("its forward was replaced by somebody else")
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    if any(getattr(one, name) for one in module.modules() for name in hooks):
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
    found = known[key]
    if isinstance(found, NotFused):
        raise NotFused(*found.args)
    return found


def _key(module: nn.Module) -> Any:
    """What a module's graph depends on: its classes, its numbers, the identity of what else it holds, its weights."""
    parts: list[Any] = []
    for name, one in module.named_modules():
        parts.append((name, type(one)))
        for attribute, value in sorted(vars(one).items()):
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
