"""The nets of a language model: as torch modules with fixed sizes, and as ONNX.

Shapes use these letters: L tokens of a prefill stage, S tokens that the KV cache holds, H hidden size, KH KV heads, D
head size, V vocabulary. All modules compute in float32; the compiler's option ``quantize`` sets the chip's dtype."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from dlinfer.errors import CaptureError
from dlinfer.graph.capture.export import read_export
from dlinfer.graph.lowering.lower import improve
from dlinfer.graph.onnx.export import OPSET, export
from dlinfer.graph.options import CompileOptions
from dlinfer.vendor.sophgo.compiler.onnx_file import onnx_bytes_or_file
from dlinfer.vendor.sophgo.compiler.translations import finite_table

_aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """One net. name: its name in the bmodel, where nets with the same name become stages of one net.

    examples: inputs to export the module with. inputs, outputs: names in the ONNX model."""

    name: str
    module: nn.Module
    examples: tuple[Tensor, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def onnx(self, folder: Path) -> bytes | Path:
        """Return the net as ONNX: its content or, if it is large, a file in ``folder``.

        Raises CaptureError and NotExportableError."""
        program = _exported(self.module, self.examples)
        exported = read_export(program, self.module, self.examples, None)
        graph_module = exported.captured.graph_module
        improve(graph_module, CompileOptions())
        _with_finite_masks(graph_module.graph)
        graph = export(graph_module, opset=OPSET, translations=finite_table)  # layers write nothing
        body = graph.model.graph
        held = len(exported.weights)
        weights = dict(zip(graph.inputs[:held], exported.weights, strict=True))
        taken = [value for value in body.inputs if value.name not in weights]
        for value, name in zip([*taken, *body.outputs], self.inputs + self.outputs, strict=True):
            value.name = name
        return onnx_bytes_or_file(graph, weights, folder)


def _with_finite_masks(graph: fx.Graph) -> None:
    """Remove the nodes that dlinfer's fusion of attention adds for mask rows of only -inf.

    The masks of these nets are finite, and Sophgo's compiler does not take the NaN in those nodes."""
    for node in graph.find_nodes(op="call_function", target=_aten.masked_fill.Scalar):
        mask, hidden, value = node.args
        if math.isnan(value) and hidden.target is _aten.all.dim:
            node.replace_all_uses_with(mask)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _exported(module: nn.Module, examples: tuple[Tensor, ...]) -> Any:
    try:
        with torch.no_grad():
            return torch.export.export(module, examples)
    except Exception as cause:  # export raises many classes; the user needs the reason
        first = (str(cause).strip().splitlines() or [""])[0]
        reason = f"torch.export: {type(cause).__name__}: {first}"
        raise CaptureError(reason=reason, line=type(module).__name__) from cause


def embedding(model: Any, length: int) -> Part:
    """Return the net that embeds tokens: input_ids [1, L] -> input_states [1, L, H]."""
    module = nn.Embedding.from_pretrained(model.model.embed_tokens.weight.float())
    example = torch.zeros(1, length, dtype=torch.int32)
    return Part("embedding", module, (example,), ("input_ids",), ("input_states",))


def head(model: Any) -> Part:
    """Return the net of the last norm and the LM head: the last token's input_states [1, 1, H] -> logits [1, 1, V]."""
    module = nn.Sequential(_float(model.model.norm), _float(model.lm_head))
    example = torch.zeros(1, 1, model.config.hidden_size)
    return Part("lm_head", module, (example,), ("input_states",), ("logits",))


def block(model: Any, index: int, tables: tuple[Tensor, Tensor], length: int) -> Part:
    """Return the net that prefills layer ``index``.

    Inputs: input_states [1, L, H], position_ids [1, L], attention_mask [1, 1, L, L] of 0 and layout.HIDDEN.
    Outputs: hidden_states [1, L, H], present_k, present_v [1, L, KH, D]."""
    return _layer(f"block_{index}", model, index, tables, length, 0)


def block_cache(model: Any, index: int, tables: tuple[Tensor, Tensor], capacity: int) -> Part:
    """Return the net that decodes layer ``index``: one new token after the tokens in a KV cache.

    Inputs: input_states [1, 1, H], position_ids [1, 1], attention_mask [1, 1, 1, S + 1], past_k, past_v [1, S, KH, D].
    Outputs: hidden_states [1, 1, H], present_k, present_v [1, 1, KH, D].

    The mask's last column is for the new token. The caller copies present_k and present_v into the KV cache."""
    return _layer(f"block_cache_{index}", model, index, tables, 1, capacity)


def _layer(
    name: str, model: Any, index: int, tables: tuple[Tensor, Tensor], length: int, capacity: int
) -> Part:
    """Return the net of a layer for ``length`` new tokens after ``capacity`` cached ones. 0 means no KV cache."""
    config = model.config
    examples = [
        torch.zeros(1, length, config.hidden_size),
        torch.zeros(1, length, dtype=torch.int32),
        torch.zeros(1, 1, length, capacity + length),
    ]
    if capacity:
        past = (1, capacity, config.num_key_value_heads, head_size(config))
        examples += [torch.zeros(past), torch.zeros(past)]
    inputs = ("input_states", "position_ids", "attention_mask", "past_k", "past_v")[: len(examples)]
    module = _Block(_float(model.model.layers[index]), tables)
    return Part(name, module, tuple(examples), inputs, ("hidden_states", "present_k", "present_v"))


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class _Block(nn.Module):
    """A layer of transformers that takes positions instead of cos and sin, and also returns the new keys and values."""

    cos: Tensor
    sin: Tensor

    def __init__(self, layer: nn.Module, tables: Sequence[Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("cos", tables[0])
        self.register_buffer("sin", tables[1])

    def forward(
        self,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        past_k: Tensor | None = None,
        past_v: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cache = _Cache(past_k, past_v)
        rows = [nn.functional.embedding(position_ids, table) for table in (self.cos, self.sin)]
        result = self.layer(
            input_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            position_embeddings=tuple(rows),
        )
        hidden = result[0] if isinstance(result, tuple) else result
        assert cache.present is not None, "the layer has updated its cache"
        return hidden, *cache.present


class _Cache:
    """The KV cache of one call of a layer, with the methods of transformers' cache that layers call.

    Layers have keys and values as [1, KH, tokens, D]. A KV cache is [1, tokens, KH, D], so a token is one row."""

    def __init__(self, past_k: Tensor | None, past_v: Tensor | None) -> None:
        self._past = (past_k, past_v)
        self.present: tuple[Tensor, Tensor] | None = None

    def update(self, keys: Tensor, values: Tensor, *ignored: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values. Return the cached and the new ones together, for the layer's attention."""
        self.present = (keys.transpose(1, 2), values.transpose(1, 2))
        if self._past[0] is None or self._past[1] is None:
            return keys, values
        pairs = zip(self._past, self.present, strict=True)
        whole = [torch.cat([past, new], dim=1).transpose(1, 2) for past, new in pairs if past is not None]
        return whole[0], whole[1]


def _float(module: nn.Module) -> nn.Module:
    """Return the module if it is float32, else a float32 copy of it."""
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return module
    return copy.deepcopy(module).float()
