"""A model in bfloat16 that becomes BF12 while LMDeploy loads it, as DLINFER_CPU_WEIGHTS=bf12 asks.

LMDeploy's layers stay what they are, so that any class loads as it always does. Each weight counts what LMDeploy copies
into it, and is packed when it is whole: parameters take no pages until they are written, so that at any time few
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
from dlinfer.framework.lmdeploy_ext.layers.quantised import head as int8_head
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

    def __init__(self, module: nn.Module, pack: Callable[[Tensor], Tensor]) -> None:
        self.module, self._pack = module, pack
        parameter: Any = module.weight
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
    def parameter(self) -> nn.Parameter:
        """The module's own."""
        found = self.module.weight
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def least_bytes(self) -> int:
        """Packed, where each exponent is one of the usual ones."""
        return bf12.packed_bytes(self.rows, self.columns)

    @property
    def is_worthwhile(self) -> bool:
        """Whether packing pays at best."""
        return self.least_bytes <= WORTHWHILE * self.plain_bytes

    def unpack(self, parameter: nn.Parameter) -> None:
        """Give a parameter of this weight its plain numbers back."""
        parameter.data = bf12.unpack(parameter.data, self.rows, self.columns).view(self._shape)
        self.is_packed = False

    def end(self) -> None:
        """Count no longer: what is loaded from now on is for LMDeploy's own loader, which knows no packed weight."""
        parameter: Any = self.parameter
        parameter.weight_loader = self._load

    def _take(self, parameter: nn.Parameter, loaded: Tensor, *part: Any, **named: Any) -> None:
        """What LMDeploy calls in place of the layer's own loader, which takes the same. part, named: which of several
        joined weights it is; one that comes again takes its place."""
        if self.is_packed:  # a checkpoint that has a weight twice
            self.unpack(parameter)
        self._load(parameter, loaded, *part, **named)
        self._copied[part, tuple(sorted(named.items()))] = loaded.numel()
        if sum(self._copied.values()) == parameter.numel() and self.is_worthwhile:
            packed = self._pack(parameter.data.flatten(0, -2))
            if packed.nbytes <= WORTHWHILE * self.plain_bytes:
                parameter.data = packed
                self.is_packed = True


class Packing:
    """What is packed of one model.

    gives_back: whether the pages of its files may be given back as they are read: classes that write into what was read
    need a copy of it.
    """

    def __init__(self, model: nn.Module, tied: bool) -> None:
        """model: LMDeploy's, no weight of it loaded. tied: whether its projection is the embedding."""
        self._model, self._tied = model, tied
        self.gives_back = type(model).__name__ in int8_head.CLASSES
        self._layers = [Weight(layer, _pack) for layer in _layers(model)]
        self._experts = [
            (one, Weight(one.gate_up, _pack), Weight(one.down, _pack)) for one in _experts(model)
        ]
        owner = _table_owner(model, tied)
        self._table = None if owner is None else Weight(owner, _pack)

    @property
    def saved_bytes(self) -> int:
        """How much less memory a model takes than in 16 bits, at best: no odd exponents."""
        return sum(one.plain_bytes - one.least_bytes for one in self._weights if one.is_worthwhile)

    @property
    def largest_weight(self) -> int:
        """Bytes of the largest weight that is packed, which is there in 16 bits until it is whole."""
        return max((one.plain_bytes for one in self._weights), default=0)

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that packed layers call."""
        table = self._table is not None
        embedding = ("embedding_bf12",) if table and self._tied else ()
        linear = ("linear_bf12",) if table or self._layers else ()
        return (*embedding, *linear, *(("fused_moe_bf12",) if self._experts else ()))

    @property
    def _weights(self) -> list[Weight]:
        table = () if self._table is None else (self._table,)
        return [*self._layers, *(one for _, *both in self._experts for one in both), *table]

    def finish(self) -> None:
        """Put layers that know packed weights in the place of LMDeploy's, once all weights are loaded."""
        del self._model.bf12_packing
        for one in self._weights:
            one.end()
        for one in self._layers:
            if one.is_packed:
                one.module.impl = LinearBF12(one.rows, one.columns)  # pyright: ignore[reportArgumentType]
        for experts, *both in self._experts:
            self._put_experts(experts, *both)
        if self._table is not None and self._table.is_packed:
            self._put_table(self._table)
        packed = [one for one in self._weights if one.is_packed]
        logger.info(
            "DLINFER_CPU_WEIGHTS=bf12: %d weights packed, of %.1f MB into %.1f MB; %d left in bfloat16",
            len(packed),
            sum(one.plain_bytes for one in packed) / 1e6,
            sum(one.parameter.nbytes for one in packed) / 1e6,
            len(self._weights) - len(packed),
        )

    @staticmethod
    def _put_experts(experts: Any, gate_up: Weight, down: Weight) -> None:
        if gate_up.is_packed and down.is_packed:
            experts.impl = ExpertsBF12(experts.impl.renormalize, experts.num_experts, down.columns)
            return
        for one in (gate_up, down):  # the op takes both packed or neither
            if one.is_packed:
                one.unpack(one.parameter)

    def _put_table(self, one: Weight) -> None:
        model: Any = self._model
        table = nn.Parameter(one.parameter.data, requires_grad=False)
        model.lm_head = HeadBF12(table, one.rows, one.columns)
        if self._tied:
            model.model.embed_tokens = EmbeddingBF12(table, one.rows, one.columns)


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
    """The linear layers whose weights are packed: LMDeploy's plain ones, of which nothing but the weight is known.

    Not the output projection, which is asked for its weight's dtype, nor a weight that several layers share.
    """
    users = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    heads = {
        id(one)
        for name, one in model.named_modules(remove_duplicate=False)
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
        one
        for one in model.modules()
        if type(one) is FusedMoE
        and type(one.impl) is Experts
        and one.tp == 1
        and one.ep_size == 1
        and one.act_func is None
        and one.gate_up.bias is None
        and one.down.bias is None
        and all(_is_packable(part.weight, 3) for part in (one.gate_up, one.down))
    ]


def _is_packable(weight: Any, rank: int = 2) -> bool:
    return isinstance(weight, nn.Parameter) and weight.dtype is torch.bfloat16 and weight.ndim == rank


def _table_owner(model: nn.Module, tied: bool) -> nn.Module | None:
    """The layer whose weight the output projection is, of classes that are known to use it for nothing else."""
    head: Any = getattr(model, "lm_head", None)
    if settings.current().cpu_head == "kept" or type(model).__name__ not in int8_head.CLASSES:
        return None
    if type(head) not in _LINEAR or head.bias is not None or head.tp != 1:
        return None
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    owner = embedding if tied else head
    given = getattr(embedding, "out_dtype", None) or embedding.weight.dtype
    is_whole = embedding.weight.shape == head.weight.shape and head.weight.dtype is given
    return owner if is_whole and _is_packable(owner.weight) else None
