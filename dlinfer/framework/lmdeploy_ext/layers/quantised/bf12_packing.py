"""A model in bfloat16 that becomes BF12 while LMDeploy loads it, as DLINFER_CPU_WEIGHTS=bf12 asks.

LMDeploy's layers stay what they are, so that any class loads as it always does. Each weight counts what LMDeploy copies
into it, and is packed when it is whole. Parameters take no pages until they are written, so that at any time few
weights are there in 16 bits. Weights that are never seen whole stay as they are.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.backends.dlinfer.linear import DlinferLinearImpl
from lmdeploy.pytorch.nn.linear import BaseLinear, MergedBaseLinear, QKVBaseLinear
from lmdeploy.pytorch.nn.moe.default import FusedMoE
from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.moe.experts import Experts
from dlinfer.framework.lmdeploy_ext.layers.quantised import table
from dlinfer.framework.lmdeploy_ext.layers.quantised.bf12 import (
    EmbeddingBF12,
    ExpertsBF12,
    HeadBF12,
    LinearBF12,
)
from dlinfer.ops.quantised import bf12

logger = logging.getLogger("dlinfer")

WORTHWHILE = 0.8
"""The largest share of its plain bytes that a packed weight may take: short rows are padded to 128 numbers, and odd
exponents take 64 bits each."""

_LINEAR = (BaseLinear, MergedBaseLinear, QKVBaseLinear)


class Weight:
    """One weight of a model: it counts what is copied into it, and is packed in its place when it is whole.

    module: the layer that has it. The parameter stays the same object, since LMDeploy looks parameters up once a file:
    packed, it holds other data, and the plain data is let go.
    """

    module: Any

    def __init__(self, module: nn.Module, pack: Callable[[Tensor], Tensor]) -> None:
        self.module, self._pack = module, pack
        parameter = self.parameter
        self._shape = parameter.shape
        self.columns = parameter.shape[-1]
        self.rows = math.prod(parameter.shape[:-1])
        self.plain_bytes = parameter.nbytes
        self.is_packed = False
        self._copied: dict[Any, int] = {}
        # torch's own embeddings, which some classes have, are loaded as LMDeploy loads what has no loader. Theirs are
        # made to be trained, which bytes cannot be.
        parameter.requires_grad_(False)
        self._load = getattr(parameter, "weight_loader", default_weight_loader)
        parameter.weight_loader = self._take

    @property
    def parameter(self) -> Any:
        """The module's own, which LMDeploy gives a ``weight_loader``."""
        return self.module.weight

    @property
    def saved_bytes(self) -> int:
        """How much less memory the packed weight takes, at best: no odd exponents. 0 where packing does not pay."""
        least = bf12.packed_bytes(self.rows, self.columns)
        return self.plain_bytes - least if least <= WORTHWHILE * self.plain_bytes else 0

    def unpack(self) -> None:
        """Give the parameter its plain numbers back where it is packed."""
        if self.is_packed:
            plain = bf12.unpack(self.parameter.data, self.rows, self.columns)
            self.parameter.data, self.is_packed = plain.view(self._shape), False

    def end(self) -> None:
        """Count no longer: what is loaded from now on is for LMDeploy's own loader, which knows no packed weight."""
        self.parameter.weight_loader = self._load

    def _take(self, parameter: nn.Parameter, loaded: Tensor, *part: Any, **named: Any) -> None:
        """LMDeploy calls it in place of the layer's own loader, which takes the same.

        part, named: which of several joined weights it is. A part that comes again takes its place.
        """
        self.unpack()  # for a checkpoint that has a weight twice
        self._load(parameter, loaded, *part, **named)
        self._copied[part, tuple(sorted(named.items()))] = loaded.numel()
        if sum(self._copied.values()) == parameter.numel() and self.saved_bytes:
            packed = self._pack(parameter.data.flatten(0, -2))
            if packed.nbytes <= WORTHWHILE * self.plain_bytes:
                parameter.data = packed
                self.is_packed = True


class Packing:
    """The packed weights of one model.

    gives_back: whether the pages of its files may be given back as they are read: classes that write into what was read
    need a copy of it.
    """

    def __init__(self, model: nn.Module, tied: bool) -> None:
        """model: LMDeploy's, no weight of it loaded. tied: whether its projection is the embedding."""
        self._model, self._tied = model, tied
        self.gives_back = type(model).__name__ in table.CLASSES
        self._layers = [Weight(layer, _pack) for layer in _layers(model)]
        self._experts = [
            (layer, Weight(layer.gate_up, _pack), Weight(layer.down, _pack)) for layer in _experts(model)
        ]
        owner = _table_owner(model, tied)
        self._table = None if owner is None else Weight(owner, _pack)

    @property
    def saved_bytes(self) -> int:
        """How much less memory a model takes than in 16 bits, at best: no odd exponents."""
        return sum(weight.saved_bytes for weight in self._weights)

    @property
    def largest_weight(self) -> int:
        """Bytes of the largest weight that is packed, which is there in 16 bits until it is whole."""
        return max((weight.plain_bytes for weight in self._weights), default=0)

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that packed layers call."""
        called = {
            "embedding_bf12": self._table and self._tied,
            "linear_bf12": self._table or self._layers,
            "fused_moe_bf12": self._experts,
        }
        return tuple(op for op, callers in called.items() if callers)

    @property
    def _weights(self) -> list[Weight]:
        projection = () if self._table is None else (self._table,)
        return [*self._layers, *(weight for _, *both in self._experts for weight in both), *projection]

    def finish(self) -> None:
        """Put layers that know packed weights in the place of LMDeploy's, once all weights are loaded."""
        del self._model.bf12_packing
        for weight in self._weights:
            weight.end()
        for weight in self._layers:
            if weight.is_packed:
                weight.module.impl = LinearBF12(weight.rows, weight.columns)
        for experts, gate_up, down in self._experts:
            if gate_up.is_packed and down.is_packed:
                experts.impl = ExpertsBF12(
                    renormalize=experts.impl.renormalize,
                    num_experts=experts.num_experts,
                    intermediate_size=down.columns,
                )
            else:  # the op takes both packed or neither
                gate_up.unpack()
                down.unpack()
        if self._table is not None and self._table.is_packed:
            numbers = nn.Parameter(self._table.parameter.data, requires_grad=False)
            parts = (numbers, self._table.rows, self._table.columns)
            table.put(self._model, HeadBF12(*parts), EmbeddingBF12(*parts) if self._tied else None)
        packed = [weight for weight in self._weights if weight.is_packed]
        logger.info(
            "DLINFER_CPU_WEIGHTS=bf12: %d weights packed, of %.1f MB into %.1f MB; %d left in bfloat16",
            len(packed),
            sum(weight.plain_bytes for weight in packed) / 1e6,
            sum(weight.parameter.nbytes for weight in packed) / 1e6,
            len(self._weights) - len(packed),
        )


def prepare(model: Any, tied: bool, dtype: torch.dtype) -> None:
    """Have a model's weights packed as they load: it gets a ``bf12_packing``, which whoever loads them finishes.

    model: LMDeploy's, its layers made and no weight loaded; on torch's device ``meta`` it says what would be packed.
    dtype: the model's. One in another than bfloat16 stays as it is, with a warning.
    """
    if dtype is not torch.bfloat16:
        logger.warning(
            "DLINFER_CPU_WEIGHTS=bf12 is for models in bfloat16: this one is loaded in %s and stays as it is.",
            str(dtype).removeprefix("torch."),
        )
        return
    model.bf12_packing = Packing(model, tied)


def _pack(weight: Tensor) -> Tensor:
    """bfloat16 [rows, columns] -> uint8 [bytes]; by the device, where it has something that is quicker."""
    packed = activation.device().pack_bf12(weight)
    return bf12.pack(weight) if packed is None else packed


def _layers(model: nn.Module) -> list[nn.Module]:
    """The linear layers whose weights are packed: LMDeploy's plain ones, which keep nothing but the weight.

    Not the output projection, which is asked for its weight's dtype, nor a weight that several layers share.
    """
    users = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    heads = {
        id(layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if name.rpartition(".")[2] == "lm_head"
    }
    return [
        layer
        for layer in model.modules()
        if type(layer) in _LINEAR
        and type(layer.impl) is DlinferLinearImpl
        and layer.tp == 1
        and id(layer) not in heads
        and users[id(layer.weight)] == 1
        and _is_packable(layer.weight)
    ]


def _experts(model: nn.Module) -> list[Any]:
    """The experts whose weights are packed: LMDeploy's plain ones, without biases and in one process."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is FusedMoE
        and type(layer.impl) is Experts
        and layer.tp == layer.ep_size == 1
        and layer.act_func is None
        and layer.gate_up.bias is None
        and layer.down.bias is None
        and all(_is_packable(part.weight, 3) for part in (layer.gate_up, layer.down))
    ]


def _is_packable(weight: Any, rank: int = 2) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dtype is torch.bfloat16 and weight.ndim == rank


def _table_owner(model: nn.Module, tied: bool) -> nn.Module | None:
    """The layer whose weight the output projection is, of classes that are known to use it for nothing else."""
    head: Any = getattr(model, "lm_head", None)
    is_plain = type(head) in _LINEAR and head.tp == 1 and table.why_kept(model) is None
    if settings.current().cpu_head == "kept" or not is_plain:
        return None
    owner: Any = model.get_input_embeddings() if tied else head  # pyright: ignore[reportCallIssue]
    return owner if _is_packable(owner.weight) else None
