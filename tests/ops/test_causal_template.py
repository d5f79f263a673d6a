"""The mask that LMDeploy's backend for Ascend gives at every prefill says no more than ``causal``; no other is."""

import pytest
import torch
from torch import Tensor

from dlinfer import ops
from dlinfer.errors import UnsupportedFeatureError

SIDE = 2048


def template(dtype: torch.dtype) -> Tensor:
    return torch.ones(SIDE, SIDE, dtype=dtype).triu(1)


def prefill(mask: list[Tensor | None], **options: object) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 16, generator=generator) for heads in (4, 2, 2))
    lengths = torch.tensor([2, 3])
    return ops.prefill_attention(q, k, v, None, None, lengths, lengths, 3, 4, 2, mask, **options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_the_template_is_taken_for_causal(dtype):
    mask = template(dtype)
    for _ in range(2):
        assert torch.equal(prefill([mask]), prefill([]))


@pytest.mark.parametrize(
    "mask",
    [
        template(torch.float32),
        template(torch.int8)[:-1, :-1],
        template(torch.int8).t(),
        template(torch.int8) * 0,
        torch.ones(5, 5).triu(1).bool(),
    ],
    ids=["another dtype", "another size", "turned round", "nothing hidden", "of the tokens"],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(UnsupportedFeatureError, match="explicit attn_mask"):
        prefill([template(torch.int8), mask])


def test_it_is_refused_where_attention_is_not_causal():
    with pytest.raises(UnsupportedFeatureError, match="explicit attn_mask"):
        prefill([template(torch.int8)], causal=False)
