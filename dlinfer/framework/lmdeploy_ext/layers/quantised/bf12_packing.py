"""Pack a bfloat16 model as BF12 while LMDeploy loads it, for DLINFER_CPU_WEIGHTS=bf12.

LMDeploy's layers stay in place during the load, so that any model class loads as usual. A ``Weight`` counts the
elements that LMDeploy copies into a parameter, and packs the parameter once it is complete. A parameter that never
becomes complete stays unpacked. A parameter takes no memory until it is written, so only a few unpacked weights are in
memory at any time.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lmdeploy.pytorch.nn.linear import MergedBaseLinear, QKVBaseLinear
from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.layers.quantised import packable, table
from dlinfer.framework.lmdeploy_ext.layers.quantised.bf12 import (
    EmbeddingBF12,
    ExpertsBF12,
    HeadBF12,
    LinearBF12,
)
from dlinfer.ops.quantised import bf12

logger = logging.getLogger("dlinfer")

WORTHWHILE = 0.8
"""The largest ratio of packed to unpacked bytes that we accept. Padding and unusual exponents take extra bytes."""


class Weight:
    """One weight of a model. It counts the elements copied into it, and packs itself once all are there.

    module: the layer that has the weight. Packing replaces the data of the parameter, not the parameter itself, since
    LMDeploy looks parameters up only once for each file.
    """

    module: Any

    def __init__(self, module: nn.Module, pack: Callable[[Tensor], Tensor], parts: int | None = None) -> None:
        """Take a layer whose weight is about to be loaded. pack: returns a packed weight, uint8 [bytes].

        parts: under tensor parallelism, the number of the checkpoint's tensors that the weight is joined from; else
        None. A rank copies only a part of each tensor, so their elements do not tell when the weight is complete.
        """
        self.module, self._pack, self._parts = module, pack, parts
        parameter = self.parameter
        self._shape = parameter.shape
        self.rows, self.columns = packable.sizes(parameter)
        self.plain_bytes = parameter.nbytes
        self.is_packed = False
        self._copied: dict[Any, int] = {}
        # Some classes have torch's own embeddings, which LMDeploy loads by its default loader. Their parameters require
        # gradients, and a tensor of bytes cannot.
        parameter.requires_grad_(False)
        self._load = getattr(parameter, "weight_loader", default_weight_loader)
        parameter.weight_loader = self._take

    @property
    def parameter(self) -> Any:
        """The weight's parameter in ``module``."""
        return self.module.weight

    @property
    def saved_bytes(self) -> int:
        """The bytes that packing saves if BF12 can encode all exponents of the weight; 0 if that is not worthwhile.

        BF12 encodes 15 neighbouring exponents. A number with another exponent takes extra bytes.
        """
        least = bf12.packed_bytes(self.rows, self.columns)
        return self.plain_bytes - least if least <= WORTHWHILE * self.plain_bytes else 0

    def unpack(self) -> None:
        """If the parameter is packed, replace its data by the unpacked weight."""
        if self.is_packed:
            plain = bf12.unpack(self.parameter.data, self.rows, self.columns)
            self.parameter.data, self.is_packed = plain.view(self._shape), False

    def end(self) -> None:
        """Stop counting, and restore the layer's own loader, which cannot load into a packed weight."""
        self.parameter.weight_loader = self._load

    def _take(self, parameter: nn.Parameter, loaded: Tensor, *part: Any, **named: Any) -> None:
        """Load a tensor with the layer's own loader, and pack the weight if it is complete. LMDeploy calls this.

        part, named: further arguments of the loader. They say which part of a joined weight ``loaded`` is, such as q of
        qkv. If a part is loaded again, its new values replace the old ones.
        """
        self.unpack()  # for a checkpoint that has a weight twice
        self._load(parameter, loaded, *part, **named)
        self._copied[part, tuple(sorted(named.items()))] = loaded.numel()
        if self._is_complete(parameter) and self.saved_bytes:
            packed = self._pack(parameter.data.flatten(0, -2))
            if packed.nbytes <= WORTHWHILE * self.plain_bytes:
                parameter.data = packed
                self.is_packed = True

    def _is_complete(self, parameter: nn.Parameter) -> bool:
        if self._parts is None:
            return sum(self._copied.values()) == parameter.numel()
        return len(self._copied) == self._parts


class Packing:
    """The packed weights of one model.

    gives_back: whether memory pages of the checkpoint's files may be released once they are read. False for model
    classes that may write into the tensors they read.
    """

    def __init__(self, model: nn.Module, tied: bool) -> None:
        """Take an LMDeploy model before its weights load.

        tied: whether the output projection uses the embedding's weight.
        """
        self._model, self._tied = model, tied
        self.gives_back = type(model).__name__ in table.CLASSES
        self._layers = [Weight(layer, _pack, _parts(layer)) for layer in packable.layers(model, _is_bfloat16)]
        self._experts = [
            (layer, *(Weight(part, _pack, count) for part, count in _parts_of_experts(layer)))
            for layer in packable.experts(model, _is_bfloat16)
        ]
        owner = _table_owner(model, tied)
        self._table = None if owner is None else Weight(owner, _pack)

    @property
    def saved_bytes(self) -> int:
        """The bytes that packing saves in the whole model if BF12 can encode all exponents of the weights."""
        return sum(weight.saved_bytes for weight in self._weights)

    @property
    def largest_weight(self) -> int:
        """The size in bytes of the largest weight to pack, unpacked.

        Until that weight is complete, it is in memory in this size.
        """
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
        """Replace LMDeploy's layers by layers that read packed weights. Call this once all weights are loaded."""
        del self._model.packing
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
            "DLINFER_CPU_WEIGHTS=bf12: packed %d weights from %.1f MB into %.1f MB, and left %d in bfloat16",
            len(packed),
            sum(weight.plain_bytes for weight in packed) / 1e6,
            sum(weight.parameter.nbytes for weight in packed) / 1e6,
            len(self._weights) - len(packed),
        )


def prepare(model: Any, tied: bool, dtype: torch.dtype) -> None:
    """Let a model pack each weight as soon as it is loaded. Sets ``model.packing``.

    After the last weight, ``model.packing.finish`` has to be called.

    model: LMDeploy's, before weights load. On the device ``meta``, ``packing`` only reports what would be packed.
    dtype: the model's. A dtype other than bfloat16 leaves the model unchanged, with a warning.
    """
    if dtype is not torch.bfloat16:
        logger.warning(
            "DLINFER_CPU_WEIGHTS=bf12 has no effect: it packs only models in bfloat16, and this model is in %s.",
            str(dtype).removeprefix("torch."),
        )
        return
    model.packing = Packing(model, tied)


def _pack(weight: Tensor) -> Tensor:
    """Pack bfloat16 [rows, columns] into uint8 [bytes], with the device's own faster function if it has one."""
    packed = activation.device().pack_bf12(weight)
    return bf12.pack(weight) if packed is None else packed


def _parts(layer: Any) -> int | None:
    """Return the ``parts`` of a layer's ``Weight``; None if this process has all of the layer."""
    if layer.tp == 1:
        return None
    if isinstance(layer, QKVBaseLinear):
        return 3
    return len(layer.all_out_features) if isinstance(layer, MergedBaseLinear) else 1


def _parts_of_experts(layer: Any) -> list[tuple[nn.Module, int | None]]:
    """Return, for gate_up and for down, the module, and the number of tensors of its weight as in ``_parts``."""
    counts = (None, None) if layer.tp == 1 else (2 * layer.num_experts, layer.num_experts)
    return list(zip((layer.gate_up, layer.down), counts, strict=True))


def _is_bfloat16(dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16


def _table_owner(model: nn.Module, tied: bool) -> nn.Module | None:
    """Return the layer that owns the output projection's weight; None if the projection is not to be packed."""
    if settings.current().cpu_head == "kept" or not packable.has_packable_head(model):
        return None
    head: Any = model.lm_head
    owner: Any = model.get_input_embeddings() if tied else head  # pyright: ignore[reportCallIssue]
    return owner if packable.is_packable(owner.weight, _is_bfloat16) else None
