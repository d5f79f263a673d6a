"""Other roundings of the same program: what a correct kernel might have given in place of torch's."""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.compare import TINY
from tests.fuzz.execute import overlap, run_step
from tests.fuzz.program import Step

_ROUNDED_INSIDE = (
    (r"F\.tanhshrink\(\{0\}\)", r"({0} - rounded(torch.tanh({0})))"),
    (
        r"F\.gelu\(\{0\}, approximate='tanh'\)",
        r"(0.5 * {0} * (1 + rounded(torch.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} ** 3)))))",
    ),
    (r"F\.gelu\(\{0\}\)", r"(0.5 * {0} * (1 + rounded(torch.erf({0} * 0.7071067811865476))))"),
    (
        r"F\.log_softmax\(\{0\}, (-?\d+)\)",
        r"({0} - {0}.amax(\1, True) - rounded(({0} - {0}.amax(\1, True)).exp().sum(\1, True)).log())",
    ),
    (
        r"dlinfer\.ops\.silu_and_mul\(\{0\}\)",
        r"(rounded(F.silu({0}.chunk(2, -1)[0])) * {0}.chunk(2, -1)[1])",
    ),
    (r"\{0\}\.copy_\(\{0\}\.cumsum\(0\)\)", r"{0}.copy_(rounded({0}).cumsum(0))"),
    (r"\{0\}\.cumsum_\(0\)", r"{0}.copy_(rounded({0}).cumsum(0))"),
    (r"\{0\}\.copy_\(torch\.cumsum\(\{1\}, 0\)\)", r"{0}.copy_(torch.cumsum(rounded({1}), 0))"),
    (r"dlinfer\.ops\.silu_mul\(\{0\}, \{1\}\)", r"(rounded(F.silu({0})) * {1})"),
    (r"\{0\}\.add_\(\{0\}\.sum\(\)\)", r"{0}.add_(rounded({0}).sum())"),
    (r"\{0\}\.addcmul_\(\{1\}, \{1\}\)", r"{0}.add_(rounded({1} * {1}))"),
    (r"\(\{0\} \* 2 \+ \{1\}\)\.sin\(\)", r"rounded({0} * 2 + {1}).sin()"),
    (r"\{1\}\.sin\(\) - ", r"rounded({1}.sin()) - "),
    (
        r"torch\.rsqrt\(\{0\}\.pow\(2\)\.mean\(-1, keepdim=True\) \+ 1e-6\)",
        r"rounded(torch.rsqrt(rounded({0}.pow(2).mean(-1, keepdim=True)) + 1e-6))",
    ),
    (r"torch\.erf\(\{0\}\)", r"rounded(rounded(torch.erf({0})))"),
    (r"((?:dlinfer\.ops|F)\.rms_norm\(\{0\}, .*\))", r"scaled_by_sums(\1)"),
)
"""Functions that round in between and then may cancel nearly all of it, the same with that rounding in sight; and those
that approximate: OpenVINO's erf is off by up to nine roundings. A norm divides by one sum of many squares."""


_SPREAD = 0x9E3779B97F4A7C15
"""Small seeds give runs whose first numbers are alike."""


def perturbing(seed: int) -> Callable[..., Any]:
    """A replacement of ``run_step`` whose operands and results are off by a rounding of their dtype, at random.

    What is moved, viewed or not touched by a write stays exact. An odd run moves what the one before it moved, the
    other way. In runs 0 and 1 only results move: all away from 0, or all towards it, as where a kernel is off by the
    same for equal numbers; and all their zeros are positive, or all negative.
    """
    random = torch.Generator().manual_seed(_SPREAD * (seed // 2 + 1) % 2**63)
    way = 1 - 2 * (seed % 2)

    def perturbed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return nudged(value)

    def nudged(value: torch.Tensor) -> torch.Tensor:
        sign = (torch.rand(value.shape, generator=random, dtype=torch.float64) - 0.5).sign() * way
        sign = torch.full_like(sign, way) if seed < 2 else sign
        return flushed((value.double() * (1 + sign * torch.finfo(value.dtype).eps)).to(value.dtype))

    def scaled_by_sums(value: torch.Tensor) -> torch.Tensor:
        """Rows of norms, each off by one factor: float32 sums of n equal squares, one after another, are off by more
        than sqrt(n) roundings."""
        sums = torch.finfo(torch.float32).eps * value.shape[-1] ** 0.5 / 4 if value.dim() else 0.0
        return (value.double() * (1 + way * sums)).to(value.dtype)

    def flushed(value: torch.Tensor) -> torch.Tensor:
        """Some of what is hardly a number is 0, of either sign, in which torch's own kernels differ: in run 0 all of
        it. NaN and infinities stay what they are."""
        tiny = value.abs() < TINY[value.dtype]
        some = torch.rand(value.shape, generator=random) < (0.5 if seed else 1.0)
        return zeros_of_any_sign(value.masked_fill(tiny & some, 0))

    def zeros_of_any_sign(value: torch.Tensor) -> torch.Tensor:
        if seed < 2:
            return value.masked_fill(value == 0, 0.0 * way)
        return torch.where((value == 0) & (torch.rand(value.shape, generator=random) < 0.5), -value, value)

    def make(step: Step, values: Mapping[str, Any], names: dict[str, Any], widen: bool) -> Any:
        if not step.rounds:  # what it writes is exact; attention beside it is not
            made = run_step(step, values, names)
            if not isinstance(made, torch.Tensor) or not made.is_floating_point():
                return made
            if (
                "selection by order" in step.features
            ):  # of equal numbers, which 0 and -0 are, any may be taken
                return zeros_of_any_sign(made)
            return (
                summed_otherwise(made, step, values) if step.makes and "attention" in step.features else made
            )
        names = {**names, "rounded": perturbed, "scaled_by_sums": scaled_by_sums}
        for pattern, made_of in _ROUNDED_INSIDE:
            step = replace(step, text=re.sub(pattern, made_of, step.text))
        if "write" in step.features:
            return _write(step, values, names)
        made = run_step(step, values, names)
        operands = {name: values[name] for name in step.uses}
        tensors = [one for one in operands.values() if isinstance(one, torch.Tensor)]
        if not made.is_floating_point() or any(overlap(made, one) for one in tensors):
            return made
        if seed > 1:
            operands = {name: perturbed(one) for name, one in operands.items()}
        return perturbed(run_step(step, {**values, **operands}, names))

    def _write(step: Step, values: Mapping[str, Any], names: dict[str, Any]) -> Any:
        target = values[step.uses[0]]
        before = target.clone()
        made = run_step(step, values, names)
        if target.is_floating_point() and target.shape == before.shape:
            changed = (target != before) | (target == 0)
            with contextlib.suppress(RuntimeError):  # elements that share memory are written by no copy
                target.copy_(torch.where(changed, perturbed(target), target))
        if not step.makes or any(overlap(made, values[name]) for name in step.uses):
            return made
        return summed_otherwise(made, step, values) if made.is_floating_point() else made

    def summed_otherwise(made: torch.Tensor, step: Step, values: Mapping[str, Any]) -> torch.Tensor:
        """The result of a step that also writes and is not run again: each element moves by a rounding of the largest
        number that it may be a sum of."""
        operands = [one for name in step.uses if isinstance(one := values[name], torch.Tensor)]
        summed = [one for one in (made, *operands) if one.is_floating_point()]
        largest = max(
            float(one.double().abs().nan_to_num(0.0, 0.0, 0.0).amax()) if one.numel() else 0.0
            for one in summed
        )
        share = torch.rand(made.shape, generator=random, dtype=torch.float64) * 2 - 1
        return (made.double() + share * torch.finfo(made.dtype).eps * largest).to(made.dtype)

    return make
