"""Keep the weights of a GGUF file in blocks while LMDeploy loads its model.

LMDeploy builds the model with its own layers. Tensors that stay in blocks do not pass through LMDeploy's loaders: they
are put together here, with the parts of joined layers behind each other. The parameters of those layers are never
written, and so take no memory. All other tensors are unpacked and loaded as usual.
"""

import logging
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from lmdeploy.pytorch.nn.embedding import ParallelEmbedding
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.framework.lmdeploy_ext.conversion.loading import Layers
from dlinfer.framework.lmdeploy_ext.device import activation, huge_pages
from dlinfer.framework.lmdeploy_ext.gguf import weights
from dlinfer.framework.lmdeploy_ext.gguf.names import Source
from dlinfer.framework.lmdeploy_ext.layers.quantised import packable
from dlinfer.framework.lmdeploy_ext.layers.quantised.gguf import (
    EmbeddingGguf,
    ExpertsGguf,
    HeadGguf,
    LinearGguf,
)
from dlinfer.ops.core.checks import FLOATS
from dlinfer.ops.quantised.gguf import TYPES

logger = logging.getLogger("dlinfer")

_PLACES = {"k_proj": 1, "v_proj": 2, "up_proj": 1, "w3": 1}
"""Projection -> its place in the layer that LMDeploy joins it into. All others stand first."""

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Weight:
    """The bytes of one layer's weight. ``put`` fills them part by part, and ``finish`` gives them to the layer.

    module: the layer. types, rows, columns: of the matrices in it, each expert's if the layer has experts.
    """

    module: Any

    def __init__(self, module: nn.Module, sources: Iterable[Source]) -> None:
        self.module = module
        parts = {_place(source.name): source for source in sources}
        self._parts = dict(sorted(parts.items()))
        ends = accumulate(source.entry.nbytes for source in self._parts.values())
        self._ends = dict(zip(self._parts, ends, strict=True))
        self.experts = len({expert for expert, _ in parts})
        first = [
            source for (expert, _), source in self._parts.items() if expert == next(iter(self._parts))[0]
        ]
        self.types = [source.entry.type for source in first]
        self.rows = [source.shape[0] for source in first]
        self.columns = first[0].shape[1]
        self.plain_bytes: int = self.module.weight.nbytes
        self.nbytes = next(reversed(self._ends.values()))
        self._bytes: Tensor | None = None
        self._missing = set(self._parts)

    def put(self, name: str, blocks: Tensor) -> None:
        """Copy a part of the weight. name: the checkpoint's name of it."""
        place = _place(name)
        if self._bytes is None:
            self._bytes = torch.empty(self.nbytes, dtype=torch.uint8)
            huge_pages.wish_for([self._bytes])
        end = self._ends[place]
        self._bytes[end - blocks.numel() : end] = blocks.flatten()
        self._missing.discard(place)

    def finish(self) -> None:
        """Give the layer's parameter the bytes."""
        assert self._bytes is not None and not self._missing, "the header names all parts"
        # Some classes have torch's own embeddings. Their parameters require gradients, and a tensor of bytes cannot.
        self.module.weight.requires_grad_(False).data = self._bytes
        self._bytes = None


def _place(name: str) -> tuple[int, int]:
    """Return the place of a checkpoint's tensor in its layer: (expert, place among joined matrices)."""
    *before, part, _ = name.split(".")
    is_expert = before[-2:-1] == ["experts"]
    return int(before[-1]) if is_expert else 0, _PLACES.get(part, 0)


class Packing:
    """The weights of one model that stay in blocks.

    dtype: the model's. gives_back: whether pages of the file may be released once they are read.
    largest_weight: 0, because no weight is in memory unpacked before it is packed.
    """

    gives_back, largest_weight = True, 0

    def __init__(self, model: nn.Module, tied: bool, dtype: torch.dtype, path: Path) -> None:
        """Take an LMDeploy model before its weights load. tied: whether the output projection uses the embedding."""
        self._model, self._tied, self.dtype, self._path = model, tied, dtype, path
        sources = weights.sources(path)
        self._weights: dict[str, Weight] = {}
        self._layers: list[Any] = []
        self._experts: list[Any] = []
        on_host = activation.device().memory().shared and dtype in FLOATS
        owners = self._owners() if on_host else {}
        layers, of_module = Layers(model), dict[int, list[Source]]()
        for name, source in sources.items():
            owner = self._table_owner(name) or layers.owner(name)
            if owner is not None and id(owner) in owners and name.endswith(".weight"):
                of_module.setdefault(id(owner), []).append(source)
        for both in self._together(owners):
            parts = [of_module.get(number, []) for number in both]
            if all(_stay_in_blocks(own) for own in parts):
                for number, own in zip(both, parts, strict=True):
                    self._weights |= dict.fromkeys(
                        (source.name for source in own), Weight(owners[number], own)
                    )
        self._unpacked = [
            source
            for name, source in sources.items()
            if name not in self._weights and not weights.is_float(source.entry.type)
        ]

    def _owners(self) -> dict[int, nn.Module]:
        """Return the modules that may have weights in blocks, by their ids."""
        model, packs = self._model, lambda dtype: dtype in FLOATS
        self._layers = packable.layers(model, packs)
        self._experts = packable.experts(model, packs)
        owners = [*self._layers, *(part for layer in self._experts for part in (layer.gate_up, layer.down))]
        if settings.current().cpu_head != "kept" and packable.has_packable_head(model):
            embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
            if isinstance(embedding, ParallelEmbedding | nn.Embedding):
                owners.append(embedding)
            if not self._tied:
                owners.append(model.lm_head)  # pyright: ignore[reportArgumentType]
        return {id(owner): owner for owner in owners}

    def _together(self, owners: dict[int, nn.Module]) -> list[tuple[int, ...]]:
        """Return the modules' ids, those in a tuple whose weights have to be in blocks all or none."""
        pairs = [(id(layer.gate_up), id(layer.down)) for layer in self._experts] if owners else []
        paired = {number for pair in pairs for number in pair}
        return pairs + [(number,) for number in owners if number not in paired]

    def _table_owner(self, name: str) -> Any:
        if name == _EMBEDDING:
            return self._model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        return getattr(self._model, "lm_head", None) if name == _HEAD else None

    @property
    def saved_bytes(self) -> int:
        """The bytes that the whole model takes less than with weights of its dtype."""
        return sum(weight.plain_bytes - weight.nbytes for weight in self._all())

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that layers with weights in blocks call."""
        experts = {id(part) for layer in self._experts for part in (layer.gate_up, layer.down)}
        kinds = {self._kind(name, weight, experts) for name, weight in self._weights.items()}
        if self._tied and _EMBEDDING in self._weights:
            kinds.add("linear_gguf")
        return tuple(sorted(kinds))

    @staticmethod
    def _kind(name: str, weight: Weight, experts: set[int]) -> str:
        if name == _EMBEDDING:
            return "embedding_gguf"
        return "fused_moe_gguf" if id(weight.module) in experts else "linear_gguf"

    def _all(self) -> list[Weight]:
        return list({id(weight): weight for weight in self._weights.values()}.values())

    def keeps(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint stays in blocks."""
        return name in self._weights

    def put(self, name: str, blocks: Tensor) -> None:
        """Take a tensor in blocks, uint8 [rows, bytes of a row]. It may be a view of the file."""
        self._weights[name].put(name, blocks)

    def finish(self) -> None:
        """Replace LMDeploy's layers by layers that read blocks. Call this once all weights are loaded."""
        del self._model.packing
        of_module = {id(weight.module): weight for weight in self._all()}
        for weight in of_module.values():
            weight.finish()
        for layer in self._layers:
            if weight := of_module.get(id(layer)):
                layer.impl = LinearGguf(weight.types, weight.rows, weight.columns, self.dtype)
        for layer in self._experts:
            if id(layer.gate_up) in of_module:
                self._finish_experts(layer, of_module[id(layer.gate_up)], of_module[id(layer.down)])
        self._finish_tables()
        self._tell()

    def _finish_experts(self, layer: Any, gate_up: Weight, down: Weight) -> None:
        for weight in (gate_up, down):
            parameter = weight.module.weight
            parameter.data = parameter.data.view(weight.experts, -1)
        layer.impl = ExpertsGguf(
            renormalize=layer.impl.renormalize,
            intermediate_size=down.columns,
            gate_up_types=gate_up.types,
            down_type=down.types[0],
        )

    def _finish_tables(self) -> None:
        model: Any = self._model
        for name in (_EMBEDDING, _HEAD):
            if weight := self._weights.get(name):
                table = nn.Parameter(weight.module.weight.data, requires_grad=False)
                sizes = (table, weight.types[0], weight.rows[0], weight.columns, self.dtype)
                if name == _EMBEDDING:
                    model.model.embed_tokens = EmbeddingGguf(*sizes)
                if name == _HEAD or self._tied:
                    model.lm_head = HeadGguf(*sizes)

    def _tell(self) -> None:
        if packed := self._all():
            nbytes = sum(weight.nbytes for weight in packed)
            logger.info("%s: %d weights stay in blocks, %.1f MB", self._path, len(packed), nbytes / 1e6)
        if self._unpacked:
            numbers = sum(
                source.entry.nbytes // source.entry.row_bytes * source.shape[-1] for source in self._unpacked
            )
            logger.warning(
                "%s: %d tensors do not stay in blocks, such as %s of type %s. Unpacked they take %.1f MB, and %.1f MB "
                "in the file.",
                self._path,
                len(self._unpacked),
                self._unpacked[0].name,
                weights.type_name(self._unpacked[0].entry.type),
                numbers * self.dtype.itemsize / 1e6,
                sum(source.entry.nbytes for source in self._unpacked) / 1e6,
            )


def _stay_in_blocks(parts: list[Source]) -> bool:
    """Return whether a layer's matrices stay in blocks: if there are blocks among them, and kernels for all."""
    kinds = {source.entry.type for source in parts}
    return bool(kinds) and kinds <= TYPES.keys() and not all(weights.is_float(kind) for kind in kinds)


def prepare(model: Any, tied: bool, dtype: torch.dtype, path: Path) -> None:
    """Let a model keep weights in the blocks of a GGUF file. Sets ``model.packing``.

    After the last weight, ``model.packing.finish`` has to be called. model: LMDeploy's, before weights load. On the
    device ``meta``, ``packing`` only reports what would stay in blocks. path: the GGUF file.
    """
    model.packing = Packing(model, tied, dtype, path)
