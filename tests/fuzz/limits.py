"""Differences that the documentation announces: the engine, the line of docs that says so, and eager computing as that
line says. Nothing else is forgiven: an engine's results have to be what eager gives with the documented differences."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tests.fuzz.compare import Difference
from tests.fuzz.program import Program


@dataclass(frozen=True)
class Limit:
    """engine: whose. docs: the line that says so, word for word. computes: what a function of torch's gives by that
    line, of the function, its arguments and its result."""

    engine: str
    docs: str
    computes: Callable[..., Any]


class Documented(TorchFunctionMode):
    """Functions of torch's give what the documentation of an engine says of them."""

    def __init__(self, limits: tuple[Limit, ...]) -> None:
        super().__init__()
        self._limits = limits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        scores = _scores(*args, **kwargs) if function is F.scaled_dot_product_attention else None
        large = function in _EXPONENTIALS and args[0].is_floating_point() and args[0].double() > _LARGEST
        result = function(*args, **kwargs)
        for limit in self._limits:
            if scores is not None and limit.computes in _OF_SCORES:
                result = limit.computes(result, scores)
            elif large is not False and limit.computes is _exponential:
                result = limit.computes(result, large)
            elif function in _CHOICES and limit.computes is _positive_zeros:
                result = limit.computes(result)
        return result


_EXPONENTIALS = (torch.exp, torch.Tensor.exp, torch.Tensor.exp_, torch.expm1, torch.Tensor.expm1)
_LARGEST = 88.376


_CHOICES = (torch.where, torch.Tensor.where, torch.masked_fill, torch.Tensor.masked_fill)
_CHOICES += (torch.Tensor.masked_fill_,)


def _positive_zeros(result: torch.Tensor) -> torch.Tensor:
    return result.masked_fill_(result == 0, 0) if result.is_floating_point() else result


def _exponential(result: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    return result.masked_fill_(large, float("inf"))


class Scores(NamedTuple):
    """Of an attention's queries and keys, each [..., queries, keys].

    shown: which keys a query may see. masked: the scores in float64, -inf for the other keys. plain: the same, with
    what causality hides. unmasked: the same, with what the mask hides too. value: the values.
    """

    shown: torch.Tensor
    masked: torch.Tensor
    plain: torch.Tensor
    unmasked: torch.Tensor
    value: torch.Tensor

    @property
    def infinite(self) -> torch.Tensor:
        """Which queries have no finite score."""
        return ((self.masked == -torch.inf) | self.masked.isnan()).all(-1, keepdim=True)


def _no_score(result: torch.Tensor, scores: Scores) -> torch.Tensor:
    return result.masked_fill(scores.infinite & scores.shown.any(-1, keepdim=True), float("nan"))


def _no_score_of_all(result: torch.Tensor, scores: Scores) -> torch.Tensor:
    met = (scores.masked.isnan() & scores.shown).any(-1, keepdim=True) | scores.shown.all(-1, keepdim=True)
    return result.masked_fill(scores.infinite & met, float("nan"))


def _nan_score(result: torch.Tensor, scores: Scores) -> torch.Tensor:
    met = (scores.masked.isnan() & scores.shown).any(-1, keepdim=True)
    return result.masked_fill(scores.infinite & met, float("nan"))


def _no_key(result: torch.Tensor, scores: Scores) -> torch.Tensor:
    return result.masked_fill(~scores.shown.any(-1, keepdim=True), 0)


def _hidden(result: torch.Tensor, scores: Scores) -> torch.Tensor:
    lost = (scores.plain.isnan() | (scores.plain == torch.inf)) & ~scores.shown
    return result.masked_fill(lost.any(-1, keepdim=True), float("nan"))


def _shown_keys(result: torch.Tensor, scores: Scores) -> torch.Tensor:
    lost = (scores.unmasked.isnan() | (scores.unmasked == torch.inf)) & ~scores.shown
    shares = scores.masked.softmax(-1).masked_fill(~scores.shown, 0)
    terms = shares[..., None] * scores.value.double()[..., None, :, :]
    sums = terms.masked_fill(~scores.shown[..., None], 0).sum(-2)
    return torch.where(lost.any(-1, keepdim=True), sums.to(result.dtype), result)


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Scores:
    if enable_gqa:
        key, value = (one.repeat_interleave(query.size(-3) // one.size(-3), -3) for one in (key, value))
    scores = (
        query.double() @ key.double().transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    )
    shown, unmasked = torch.ones_like(scores, dtype=torch.bool), scores
    if is_causal:
        shown = shown.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown = shown & attn_mask
    elif attn_mask is not None:
        shown = shown & (attn_mask != -torch.inf)
        scores = scores + attn_mask
    masked = scores.masked_fill(~shown, -torch.inf)
    return Scores(shown, masked, scores if is_causal else masked, unmasked, value)


_OF_SCORES = (_nan_score, _shown_keys, _no_score, _no_score_of_all, _no_key, _hidden)

_NO_SCORE = (
    "A query of infinite numbers, or over infinite keys, whose scores are all -infinity or NaN gives NaN"
)
_NO_SCORE_OF_ALL = (
    "A query whose scores are all -infinity or NaN gives NaN where one is NaN, or no key is hidden from it"
)
_NAN_SCORE = (
    "A query whose scores are all -infinity or NaN gives NaN where one is NaN. torch's kernel gives 0"
)
_SHOWN_KEYS = "A key that the mask hides counts for nothing, even where its score is infinity or NaN"
_SHOWN_BY_BOOLS = (
    "A key that a mask of bools or `is_causal` hides counts for nothing, even where its score is infinity"
)
_NO_KEY = "A query that sees no key gives 0 even where a value is infinite or NaN"
_HIDDEN = "A key that `is_causal` hides, and whose score is infinity or NaN, makes the result NaN"
_EXP = "`exp` is infinite from 88.38 on, where torch's is from 88.73 on"
_ZEROS = "`where` and `masked_fill` give 0 for -0.0"

LIMITS = (
    Limit("inductor", _SHOWN_KEYS, _shown_keys),
    Limit("inductor", _NAN_SCORE, _nan_score),
    Limit("openvino", _NO_KEY, _no_key),
    Limit("openvino", _NO_SCORE, _no_score),
    Limit("openvino", _HIDDEN, _hidden),
    Limit("openvino", _EXP, _exponential),
    Limit("onnxruntime", _NO_SCORE_OF_ALL, _no_score_of_all),
    Limit("onnxruntime", _SHOWN_BY_BOOLS, _shown_keys),
    Limit("onnxruntime", _ZEROS, _positive_zeros),
)

_SLOTS = (
    "The slots that the model was given must be these; each run checks them first, and the blocks and lengths too, and"
    " raises `OpArgumentError` before anything is written"
)


def refused_slots(program: Program, engine: str, difference: Difference) -> str:
    """The line of docs by which an engine raises of the slots that a program gives; empty where none does."""
    raised = (difference.kind, difference.what) == ("error", "OpArgumentError")
    return (
        _SLOTS
        if engine == "openvino" and raised and any("paged" in step.text for step in program.steps)
        else ""
    )


def documented(engine: str) -> Iterator[tuple[str, Documented]]:
    """Each combination of what the documentation says of an engine: the lines, and the mode in which eager does so."""
    mine = [limit for limit in LIMITS if limit.engine == engine]
    for count in range(1, len(mine) + 1):
        for some in combinations(mine, count):
            yield "; ".join(limit.docs for limit in some), Documented(some)


def undocumented(text: str) -> list[str]:
    """The lines that limits name and that the text of the docs lacks: their limits are to go."""
    flat = re.sub(r"\s+", " ", text)
    return [docs for docs in (*(limit.docs for limit in LIMITS), _SLOTS) if docs not in flat]
