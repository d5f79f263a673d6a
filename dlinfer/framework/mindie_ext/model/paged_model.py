"""A transformers model as one function of packed tokens and a paged KV cache."""

from typing import Any

from torch import Tensor, nn

from dlinfer.framework.transformers_ext import Pages


class PagedModel(nn.Module):
    """Wraps a causal language model that was loaded with ``attn_implementation="dlinfer_paged"``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, pages: Pages) -> Tensor:
        """Return the logits of the tokens in ``rows``, [n, vocabulary] in the model's dtype. Mutates ``pages.caches``.

        input_ids, position_ids: [tokens] int64. rows: [n] int64, indices of tokens in input_ids.
        """
        out = self.model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            logits_to_keep=rows,
            pages=pages,
            return_dict=True,
        )
        return out.logits[0]
