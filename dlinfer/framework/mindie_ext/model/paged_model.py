"""A transformers model as one function of packed tokens and pages."""

from typing import Any

from torch import Tensor, nn

from dlinfer.framework.transformers_ext import Pages


class PagedModel(nn.Module):
    """Calls a causal language model that was loaded with ``attn_implementation="dlinfer_paged"``."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor, pages: Pages) -> Tensor:
        """Logits of the tokens that are asked for. ``pages.caches`` are mutated.

        input_ids, position_ids: [tokens] int64. rows: [n] int64, the tokens whose logits are wanted. Returns
        [n, vocabulary] in the model's dtype.
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
