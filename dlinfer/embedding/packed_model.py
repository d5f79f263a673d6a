"""A transformers model over packed texts, as one compiled graph. The graph serves any number of texts and tokens."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dlinfer import settings
from dlinfer.embedding.errors import EmbeddingFolderError
from dlinfer.embedding.tokens import Tokens
from dlinfer.errors import CaptureError
from dlinfer.framework.transformers_ext import Packing, optimize, packed
from dlinfer.framework.transformers_ext.identity import model_identity
from dlinfer.graph.bound_call.store import compile_call
from dlinfer.graph.report.policy import leave_graph
from dlinfer.graph.torch_private.dynamo import mark_unbacked

_CHECKED_LENGTHS = (150, 37)  # longer than the window of ModernBERT's local attention
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""dtype -> the largest difference to transformers' own forward, as a part of the largest hidden state."""


class PackedModel(nn.Module):
    """The layers of a model that were loaded by transformers, without its head.

    positions: the most tokens of a text that the model can place. None: any number.
    how: "compiled", "loaded" (from the disk cache) or "eager" (the model cannot be captured); empty before the first
    forward.
    """

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.how = ""
        self._call: Callable[..., Any] | None = None
        self.positions = _limit(base)
        self._first_position = _positions(base)[1]
        self._takes_types = "token_type_ids" in inspect.signature(type(base).forward).parameters

    @classmethod
    def of(cls, folder: Path, model: Any) -> "PackedModel":
        """Return the packed model of ``model``, which was loaded with another attention.

        The first forward is compared with transformers' own. Raises EmbeddingFolderError if texts cannot be packed.
        """
        base = model.base_model
        if not getattr(base, "_supports_attention_backend", False):
            raise EmbeddingFolderError(
                folder=folder,
                reason=f"the attention of {type(base).__name__} is not transformers' AttentionInterface",
                advice="use a model of another family; docs/guides/embeddings.md lists those that are served.",
            )
        new = cls(base)
        rows = examples(base)
        with torch.no_grad():
            expected = torch.cat(
                [base(input_ids=torch.tensor([row.ids])).last_hidden_state[0] for row in rows]
            )
        model.set_attn_implementation(packed.NAME)
        optimize(base)
        with torch.no_grad():
            hidden = new.hidden(rows)[0]
        if differs(hidden, expected):
            raise EmbeddingFolderError(
                folder=folder,
                reason=f"{type(base).__name__} computes something else for packed texts",
                advice="use a model of another family; docs/guides/embeddings.md lists those that are served.",
            )
        return new

    def hidden(self, rows: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        """Return the hidden states of texts, [tokens, size], and the texts' lengths, [texts] int64."""
        lengths = torch.tensor([len(row) for row in rows])
        positions = [torch.arange(self._first_position, self._first_position + len(row)) for row in rows]
        types = None
        if self._takes_types:
            types = torch.tensor([kind for row in rows for kind in row.types or (0,) * len(row)])
        kwargs = {
            "input_ids": torch.tensor([token for row in rows for token in row.ids]),
            "position_ids": torch.cat(positions),
            "token_type_ids": types,
            "packing": Packing(lengths.cumsum(0), lengths),
        }
        with torch.no_grad():
            return (self._compile(kwargs) if self._call is None else self._call(**kwargs)), lengths

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor | None, packing: Packing
    ) -> Tensor:
        """Return the hidden states of the last layer, [tokens, size]. All tensors but packing's are [tokens] int64."""
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids[None]}
        out = self.base(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            packing=packing,
            return_dict=True,
            **more,
        )
        return out.last_hidden_state[0]

    def _compile(self, kwargs: dict[str, Any]) -> Tensor:
        for name in ("input_ids", "position_ids", "token_type_ids"):
            if kwargs[name] is not None:
                mark_unbacked(kwargs[name], 0, "tokens")
        for tensor in (kwargs["packing"].ends, kwargs["packing"].lengths):
            mark_unbacked(tensor, 0, "texts")
        identity = model_identity(self, self.base.config)
        try:
            self._call, result, stored = compile_call(self, kwargs, identity=identity)
        except CaptureError as error:
            leave_graph(type(self.base).__name__, error, settings.current().fallback)
            self._call, self.how = self, "eager"
            return self(**kwargs)
        self.how = "loaded" if stored else "compiled"
        return result


def examples(base: Any) -> list[Tokens]:
    """Return two texts of arbitrary tokens, which are not the padding token, to compare forwards with."""
    config = base.config
    padding = getattr(config, "pad_token_id", None)
    usable = [token for token in range(min(config.vocab_size, 1000)) if token != padding]
    lengths = [min(length, _limit(base) or length) for length in _CHECKED_LENGTHS]
    return [Tokens([usable[(7 * at + length) % len(usable)] for at in range(length)]) for length in lengths]


def differs(result: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Return whether a result is not transformers' own, within what the dtype's rounding explains.

    scale: the least size of the numbers that a result is computed from. Sums of them may be near 0.
    """
    bound = _TOLERANCES[expected.dtype] * max(scale, float(expected.abs().max()))
    return not float((result - expected).abs().max()) <= bound


def _limit(base: Any) -> int | None:
    """Return how many tokens a model can place. None: any number."""
    limits = (_positions(base)[0], getattr(base.config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def _positions(base: nn.Module) -> tuple[int | None, int]:
    """Return how many tokens the table of positions can place, None without a table, and the first token's position.

    RoBERTa and its like number positions from the row after the padding token's on.
    """
    for module in base.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding):
            padding = getattr(module, "padding_idx", None)
            first = padding + 1 if isinstance(padding, int) else 0
            return table.num_embeddings - first, first
    return None, 0
