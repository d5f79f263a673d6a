"""Pack a model's weights while LMDeploy loads it, for DLINFER_CPU_WEIGHTS.

LMDeploy's layers stay in place during the load, so that any model class loads as usual. A ``Weight`` counts the
elements that LMDeploy copies into a parameter, and packs the parameter once it is complete. A parameter that never
becomes complete stays unpacked. A parameter takes no memory until it is written, so only a few unpacked weights are in
memory at any time.
"""

import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from lmdeploy.pytorch.nn.linear import MergedBaseLinear, QKVBaseLinear
from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.layers.quantised import packable, table

logger = logging.getLogger("dlinfer")

WORTHWHILE = 0.8
"""The largest ratio of packed to unpacked bytes that we accept. Padding and unusual exponents take extra bytes."""


class Form(ABC):
    """A way to pack weights, and the layers that read them.

    bits: the value of DLINFER_CPU_WEIGHTS. dtypes: those of weights that it packs. linear_ops, experts_ops: the ops
    that its layers call. table_op: the op of a packed embedding; empty if output projections are not packed.
    """

    bits: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    linear_ops: ClassVar[tuple[str, ...]]
    experts_ops: ClassVar[tuple[str, ...]]
    table_op: ClassVar[str] = ""

    @property
    def setting(self) -> str:
        """The user's setting with its value, for texts."""
        return f"DLINFER_CPU_WEIGHTS={self.bits}"

    def admits(self, name: str) -> bool:
        """Return whether a linear layer may be packed. name: its path in LMDeploy's model."""
        return True

    def of(self, *columns: int) -> "Form":
        """Return the form of weights that one layer has. columns: of each weight."""
        return self

    @abstractmethod
    def least_bytes(self, rows: int, columns: int) -> int | None:
        """Return the bytes of a packed weight, at the least; None if a weight of this size cannot be packed."""

    @abstractmethod
    def pack(self, weight: Tensor, name: str) -> tuple[Tensor, ...]:
        """Pack [rows, columns] or [experts, rows, columns]. The first tensor becomes the parameter's data.

        name: the weight's path, for error texts.
        """

    @abstractmethod
    def unpack(self, parts: tuple[Tensor, ...], rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return a weight, [rows, columns], the experts of a layer counted as further rows. parts: of ``pack``."""

    @abstractmethod
    def linear(self, weight: "Weight") -> Any:
        """Return the implementation of a linear layer whose weight is packed."""

    @abstractmethod
    def experts(self, layer: Any, gate_up: "Weight", down: "Weight") -> Any:
        """Return the implementation of LMDeploy's layer of experts whose weights are packed."""

    def tables(self, weight: "Weight") -> tuple[table.Table, table.Table]:
        """Return (output projection, embedding) that read a packed table."""
        raise NotImplementedError


class Weight:
    """One weight of a model. It counts the elements copied into it, and packs itself once all are there.

    module: the layer that has the weight. Packing replaces the data of the parameter, not the parameter itself, since
    LMDeploy looks parameters up only once for each file.
    """

    module: Any

    def __init__(self, module: nn.Module, form: Form, parts: int | None = None, name: str = "") -> None:
        """Take a layer whose weight is about to be loaded. name: its path, for error texts.

        parts: under tensor parallelism, the number of the checkpoint's tensors that the weight is joined from; else
        None. A rank copies only a part of each tensor, so their elements do not tell when the weight is complete.
        """
        self.module, self.form, self.name, self._parts = module, form, name, parts
        parameter = self.parameter
        self.dtype = parameter.dtype
        self._shape = parameter.shape
        self.rows, self.columns = packable.sizes(parameter)
        self.plain_bytes = parameter.nbytes
        self.packed: tuple[Tensor, ...] = ()
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
    def is_packed(self) -> bool:
        return bool(self.packed)

    @property
    def saved_bytes(self) -> int:
        """The bytes that packing saves at the most; 0 if the weight cannot be packed, or if it is not worthwhile."""
        least = self.form.least_bytes(self.rows, self.columns)
        return self.plain_bytes - least if least is not None and self._is_worthwhile(least) else 0

    @property
    def nbytes(self) -> int:
        """The bytes of the weight as it is now."""
        return sum(part.nbytes for part in self.packed) or self.parameter.nbytes

    def unpack(self) -> None:
        """If the parameter is packed, replace its data by the unpacked weight."""
        if self.is_packed:
            plain = self.form.unpack(self.packed, self.rows, self.columns, self.dtype)
            self.parameter.data, self.packed = plain.view(self._shape), ()

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
            packed = self.form.pack(parameter.data, self.name)
            if self._is_worthwhile(sum(part.nbytes for part in packed)):
                parameter.data, self.packed = packed[0], packed

    def _is_worthwhile(self, packed_bytes: int) -> bool:
        return packed_bytes <= WORTHWHILE * self.plain_bytes

    def _is_complete(self, parameter: nn.Parameter) -> bool:
        if self._parts is None:
            return sum(self._copied.values()) == parameter.numel()
        return len(self._copied) == self._parts


class Packing:
    """The packed weights of one model.

    gives_back: whether memory pages of the checkpoint's files may be released once they are read. False for model
    classes that may write into the tensors they read.
    """

    def __init__(self, model: nn.Module, tied: bool, form: Form) -> None:
        """Take an LMDeploy model before its weights load.

        tied: whether the output projection uses the embedding's weight.
        """
        self._model, self._tied, self._form = model, tied, form
        self.gives_back = type(model).__name__ in table.CLASSES
        names = {id(module): name for name, module in model.named_modules()}
        layers = packable.layers(model, self._packs)
        self._layers = [
            Weight(layer, form.of(layer.weight.shape[-1]), _parts(layer), names[id(layer)])
            for layer in layers
            if form.admits(names[id(layer)])
        ]
        self._experts = [
            (layer, *_weights_of_experts(layer, form, names))
            for layer in packable.experts(model, self._packs)
        ]
        owner = self._table_owner()
        self._table = None if owner is None else Weight(owner, form)

    def _packs(self, dtype: torch.dtype) -> bool:
        return dtype in self._form.dtypes

    def _table_owner(self) -> nn.Module | None:
        """Return the layer that owns the output projection's weight; None if the projection is not to be packed."""
        kept = not self._form.table_op or settings.current().cpu_head == "kept"
        if kept or not packable.has_packable_head(self._model):
            return None
        model: Any = self._model
        owner: Any = model.get_input_embeddings() if self._tied else model.lm_head
        return owner if packable.is_packable(owner.weight, self._packs) else None

    @property
    def saved_bytes(self) -> int:
        """The bytes that packing saves in the whole model at the most."""
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
        form = self._form
        called = [form.table_op] if self._table and self._tied else []
        called += form.linear_ops if self._table or self._layers else ()
        return (*called, *(form.experts_ops if self._experts else ()))

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
                weight.module.impl = weight.form.linear(weight)
        for experts, gate_up, down in self._experts:
            if gate_up.is_packed and down.is_packed:
                experts.impl = gate_up.form.experts(experts, gate_up, down)
            else:  # the op takes both packed or neither
                gate_up.unpack()
                down.unpack()
        if self._table is not None and self._table.is_packed:
            head, embedding = self._form.tables(self._table)
            table.put(self._model, head, embedding if self._tied else None)
        packed = [weight for weight in self._weights if weight.is_packed]
        logger.info(
            "%s: packed %d weights from %.1f MB into %.1f MB, and left %d as they are",
            self._form.setting,
            len(packed),
            sum(weight.plain_bytes for weight in packed) / 1e6,
            sum(weight.nbytes for weight in packed) / 1e6,
            len(self._weights) - len(packed),
        )


def prepare(model: Any, tied: bool, dtype: torch.dtype, form: Form) -> None:
    """Let a model pack each weight as soon as it is loaded. Sets ``model.packing``.

    After the last weight, ``model.packing.finish`` has to be called.

    model: LMDeploy's, before weights load. On the device ``meta``, ``packing`` only reports what would be packed.
    dtype: the model's. A dtype that the form does not pack leaves the model unchanged, with a warning.
    """
    if dtype not in form.dtypes:
        logger.warning(
            "%s has no effect: it packs only models in %s, and this model is in %s.",
            form.setting,
            ", ".join(map(_named, form.dtypes)),
            _named(dtype),
        )
        return
    model.packing = Packing(model, tied, form)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


def _weights_of_experts(layer: Any, form: Form, names: dict[int, str]) -> list[Weight]:
    """Return the weights of gate_up and of down, of the same form."""
    own = form.of(*(part.weight.shape[-1] for part in (layer.gate_up, layer.down)))
    return [Weight(part, own, count, names[id(part)]) for part, count in _parts_of_experts(layer)]
