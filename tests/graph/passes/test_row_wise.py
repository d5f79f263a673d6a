"""Ops that are listed as row-wise give the same rows of chosen rows; every other op of ours is listed here."""

import pytest
import torch

from dlinfer.graph.passes.row_wise import _BY_NAME
from dlinfer.ops.core.samples import SampleMaker
from dlinfer.ops.core.spec import registry

ROW_WISE = {
    name.removeprefix("dlinfer."): read for name, read in _BY_NAME.items() if name.startswith("dlinfer.")
}
NOT_ROW_WISE = {
    # read other tokens, or write a cache or a state
    *("fill_kv_cache", "fill_quantised_kv_cache", "causal_conv1d", "gated_delta_rule"),
    *("prefill_attention", "paged_prefill_attention", "paged_decode_attention"),
    *("quantised_paged_prefill_attention", "quantised_paged_decode_attention"),
    *("lightning_indexer", "sparse_flash_attention"),
    *("compressed_indexer", "compressed_attention", "compress_windows"),
    # normalises columns
    "sinkhorn",
    # mutates its argument
    "all_reduce",
    # stand in front of attention, where no selection of rows gets to
    *("embedding_bf12", "embedding_gguf", "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleaved"),
}


def test_every_op_is_row_wise_or_known_not_to_be():
    assert not ROW_WISE.keys() & NOT_ROW_WISE
    assert ROW_WISE.keys() | NOT_ROW_WISE == set(registry())


@pytest.mark.parametrize("name", ROW_WISE)
def test_chosen_rows_are_those_of_the_whole_result(name):
    op, checked = registry()[name], 0
    for sample in op.sample_inputs(SampleMaker(torch.float32)):
        call = dict(zip(op.parameters, sample.args, strict=True))
        first = call[ROW_WISE[name][0]]
        dim = first.dim() - 2
        if dim < 0 or first.shape[dim] < 2:
            continue
        rows = torch.arange(first.shape[dim] - 1, -1, -2)
        chosen = {key: call[key].index_select(dim, rows) for key in ROW_WISE[name]}
        whole, some = op.reference(*sample.args), op.reference(*(call | chosen).values())
        whole, some = ([r] if isinstance(r, torch.Tensor) else r for r in (whole, some))
        tolerance = op.tolerances[torch.float32]
        for before, now in zip(whole, some, strict=True):
            torch.testing.assert_close(
                now.double(),
                before.index_select(dim, rows).double(),
                rtol=tolerance.rtol,
                atol=tolerance.atol,
                equal_nan=True,
            )
        checked += 1
    assert checked
