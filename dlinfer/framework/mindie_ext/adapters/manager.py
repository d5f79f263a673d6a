"""``AdapterManager``: load and unload LoRA adapters, and assign an adapter to each sequence of a forward."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.adapters.layer import Batch, LoraLinear
from dlinfer.framework.mindie_ext.adapters.weights import LoraWeights, read_adapter
from dlinfer.framework.mindie_ext.errors import AdapterError

BASE = "base"
"""MindIE's name of the model without an adapter."""

_NONE = (None, "", "None", BASE)


class AdapterManager:
    """The LoRA adapters of one model.

    max_loras: how many adapters may be loaded at once. max_lora_rank: the largest rank of an adapter. capacity: the
    largest number of tokens in a forward.

    The first adapter for a linear layer replaces the layer by a ``LoraLinear``, which stays. Later adapters only write
    values into the LoraLinear, so compiled graphs stay valid. ``version`` counts replaced layers: a graph that was
    compiled at an earlier version is out of date.
    """

    def __init__(self, model: nn.Module, max_loras: int, max_lora_rank: int, capacity: int = 4096) -> None:
        self._model = model
        self.max_loras, self.max_lora_rank = max_loras, max_lora_rank
        self.capacity = capacity
        self.version = 0
        self._places: dict[str, int] = {}
        self._layers: dict[str, LoraLinear] = {}
        device = next(model.parameters()).device
        self._batch = Batch(capacity if max_loras else 0, device)

    @property
    def names(self) -> list[str]:
        """The names of the loaded adapters."""
        return list(self._places)

    def load_adapter(self, lora_adapter: Mapping[str, str]) -> None:
        """Load one adapter. lora_adapter: {name: folder}. The whole adapter is checked before the model changes.

        Raises AdapterError in these cases:

        - The folder has no adapter of plain LoRA, as PEFT saves it.
        - The name is invalid or taken.
        - The model has no such module, or the module is not a Linear.
        - A shape differs from the model's, or the rank exceeds max_lora_rank.
        - max_loras adapters are already loaded.

        Raises UnsupportedFeatureError if an adapted layer is split over ranks.
        """
        if len(lora_adapter) != 1:
            advice = "pass one adapter to each call"
            raise AdapterError(
                name=", ".join(lora_adapter),
                detail=f"expected one adapter, given {len(lora_adapter)}",
                advice=advice,
            )
        ((name, path),) = lora_adapter.items()
        if name in _NONE or not 0 < len(name) <= 256:
            advice = "give it a name of 1 to 256 characters other than 'base' and 'None'"
            raise AdapterError(name=name, detail="the name is not valid", advice=advice)
        if name in self._places:
            raise AdapterError(name=name, detail="it is already loaded", advice="unload it first")
        free = set(range(self.max_loras)) - set(self._places.values())
        if not free:
            advice = "unload an adapter, or raise max_loras (with max_lora_rank) in the model_config"
            raise AdapterError(
                name=name, detail=f"max_loras = {self.max_loras} adapters are already loaded", advice=advice
            )
        weights = read_adapter(name, path)
        for module, own in weights.items():
            self._check(name, module, own)
        place = min(free)
        for module, own in weights.items():
            self._layer(module).put(place, own)
        self._places[name] = place

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises AdapterError if no adapter of this name is loaded."""
        if name not in self._places:
            known = ", ".join(self._places) or "none"
            raise AdapterError(
                name=name,
                detail="it is not loaded",
                advice=f"unload only loaded adapters (now loaded: {known})",
            )
        place = self._places.pop(name)
        for layer in self._layers.values():
            layer.put(place, None)

    def preprocess_adapter_ids(
        self,
        adapter_ids: Sequence[str | None] | None,
        model_name: str | None = None,
        model_id: str | None = None,
    ) -> list[str]:
        """Return the adapter name of each sequence. The name "base" stands for the model without an adapter.

        None, "", "None", model_name and model_id become "base". Raises AdapterError for the name of an adapter that is
        not loaded. MindIE's method does not raise, but uses the model without an adapter.
        """
        names: list[str] = []
        for adapter in [None] if adapter_ids is None else adapter_ids:
            if adapter is None or adapter in (*_NONE, model_name, model_id):
                names.append(BASE)
                continue
            if adapter not in self._places:
                known = ", ".join(self._places) or "none"
                raise AdapterError(
                    name=adapter,
                    detail="it is not loaded",
                    advice=f"load it first (now loaded: {known})",
                )
            names.append(adapter)
        return names

    @contextmanager
    def activate(self, names: Sequence[str], token_counts: Sequence[int]) -> Iterator[None]:
        """Inside the ``with`` block, forwards use these adapters.

        names: one name for all sequences, or one name for each sequence, as ``preprocess_adapter_ids`` returns them.
        token_counts: how many tokens each sequence has. Raises AdapterError if all tokens together exceed ``capacity``.
        """
        if not self._layers:
            yield
            return
        each = [names[0]] * len(token_counts) if len(names) == 1 else list(names)
        places = [self._places.get(name, -1) for name in each]
        tokens = sum(token_counts)
        if tokens > self.capacity:
            advice = "compute fewer tokens in a step, or raise max_prefill_tokens in the model_config"
            detail = f"a step has {tokens} tokens, but steps with adapters may have at most {self.capacity}"
            raise AdapterError(name=", ".join(sorted(set(each))), detail=detail, advice=advice)
        ids = torch.tensor(places).repeat_interleave(torch.tensor(token_counts))
        self._batch.ids[:tokens] = ids.to(self._batch.ids.device)
        self._batch.is_used = any(place >= 0 for place in places)
        try:
            yield
        finally:
            self._batch.is_used = False

    def _check(self, name: str, module: str, own: LoraWeights) -> None:
        try:
            layer = self._model.get_submodule(module)
        except AttributeError as error:
            advice = "load an adapter that was trained for this model"
            raise AdapterError(name=name, detail=f"the model has no {module}", advice=advice) from error
        layer = layer.base if isinstance(layer, LoraLinear) else layer
        if type(layer) is not nn.Linear:
            kind = type(layer).__name__
            raise AdapterError(
                name=name,
                detail=f"{module} is a {kind}, not a Linear",
                advice="use an adapter of linear layers only",
            )
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise UnsupportedFeatureError(
                feature=f"a LoRA adapter of {module}, which is split over ranks,",
                where="dlinfer's AdapterManager",
                advice="set world_size = 1",
            )
        rank = own.a.shape[0]
        if rank > self.max_lora_rank:
            advice = "raise max_lora_rank in the model_config"
            detail = f"{module} has rank {rank}, above max_lora_rank = {self.max_lora_rank}"
            raise AdapterError(name=name, detail=detail, advice=advice)
        if own.a.shape[1] != layer.in_features or own.b.shape[0] != layer.out_features:
            shapes = f"{tuple(own.a.shape)} and {tuple(own.b.shape)}"
            needed = f"{layer.in_features} inputs and {layer.out_features} outputs"
            detail = f"{module} has A and B of sizes {shapes}, but in the model it has {needed}"
            raise AdapterError(
                name=name, detail=detail, advice="load an adapter that was trained for this model"
            )

    def _layer(self, module: str) -> LoraLinear:
        if module not in self._layers:
            parent, _, child = module.rpartition(".")
            owner = self._model.get_submodule(parent)
            base = owner.get_submodule(child)
            assert isinstance(base, nn.Linear)
            layer = LoraLinear(base, self._batch, self.max_loras, self.max_lora_rank)
            owner.add_module(child, layer)
            self._layers[module] = layer
            self.version += 1
        return self._layers[module]
