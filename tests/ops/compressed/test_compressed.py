"""Compressed windows, their indexer and attention to both: prompts in pieces, and against transformers and float64."""

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from dlinfer import ops, vendor
from dlinfer.vendor.cpu.sparse import compressed as cpu_kernels

VENDORS = pytest.mark.parametrize("vendor_name", ["cpu", "reference"])
HEADS, SIZE, WINDOW, RATIO, BLOCK, LENGTH = 3, 8, 6, 4, 2, 43
PIECES = ([43], [1] * 43, [5, 1, 1, 9, 4, 23], [16, 16, 11], [3, 40])


def starts_of(pieces: list[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(pieces).cumsum(0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def numbers(*values: int) -> Tensor:
    return torch.tensor(values)


def entries_of(x: Tensor, gate: Tensor, bias: Tensor, overlaps: bool) -> Tensor:
    """Entries of a whole text in float64: [windows, size]."""
    length = len(bias)
    scores, rows = gate.double() + bias.double().repeat(len(x), 1)[: len(x)], x.double()
    found = []
    for end in range(length, len(x) + 1, length):
        own = slice(end - length, end)
        size = x.shape[1] // (1 + overlaps)
        parts = [(rows[own, -size:], scores[own, -size:])]
        if overlaps and end > length:
            earlier = slice(end - 2 * length, end - length)
            parts.append((rows[earlier, :size], scores[earlier, :size]))
        values, weights = (torch.cat(part) for part in zip(*parts, strict=True))
        found.append((values * weights.softmax(0)).sum(0))
    return torch.stack(found)


@VENDORS
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("overlaps", [False, True])
def test_entries_are_the_same_however_a_text_is_cut(
    vendor_name: str, pieces: list[int], overlaps: bool
) -> None:
    vendor.use(vendor_name)
    torch.manual_seed(0)
    width = SIZE * (1 + overlaps)
    x, gate, bias = torch.randn(LENGTH, width), torch.randn(LENGTH, width), torch.randn(RATIO, width)
    state = torch.full((3, 2, RATIO * (1 + overlaps), width), torch.nan)
    rows = []
    for start, end in starts_of(pieces):
        tokens = (x[start:end], gate[start:end], bias)
        rows.append(
            ops.compress_windows(*tokens, state, numbers(1), numbers(end - start), numbers(start), SIZE)
        )
    got, expected = torch.cat(rows), entries_of(x, gate, bias, overlaps)
    ends = torch.arange(RATIO - 1, LENGTH, RATIO)
    torch.testing.assert_close(got[ends].double(), expected, rtol=1e-5, atol=1e-5)
    others = torch.ones(LENGTH, dtype=torch.bool).index_fill(0, ends, False)
    assert not got[others].any()
    assert state[[0, 2]].isnan().all()


class Text:
    """One text, its entries in pages whose unwritten slots hold NaN, and its attention in float64."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.query, self.kv = torch.randn(LENGTH, HEADS, SIZE), torch.randn(LENGTH, SIZE)
        self.sinks, self.entries = torch.randn(HEADS), torch.randn(LENGTH // RATIO, SIZE)
        self.table = torch.randperm(8)[None]
        self.cache = torch.full((8, BLOCK, 1, SIZE), torch.nan)
        for number, entry in enumerate(self.entries):
            self.cache[self.table[0, number // BLOCK], number % BLOCK, 0] = entry

    def attention(self, position: int, chosen: list[int]) -> Tensor:
        first = max(0, position + 1 - WINDOW)
        keys = torch.cat((self.kv[first : position + 1], self.entries[chosen])).double()
        scores = self.query[position].double() @ keys.t() * 0.3
        weights = torch.cat((scores, self.sinks[:, None].double()), dim=1).softmax(1)
        return weights[:, :-1] @ keys


@VENDORS
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_attention_is_the_same_however_a_text_is_cut(
    vendor_name: str, pieces: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "_PIECE", 7)
    vendor.use(vendor_name)
    text, state = Text(), torch.full((3, WINDOW, SIZE), torch.nan)
    choice = torch.stack([torch.randperm(14)[:4] - 2 for _ in range(LENGTH)])[:, None]
    got = []
    for start, end in starts_of(pieces):
        sequence = (numbers(2), numbers(end - start), numbers(end))
        cache = None if kind == "window" else text.cache
        chosen = choice[start:end] if kind == "chosen" else None
        tokens = (text.query[start:end], text.kv[start:end], text.sinks, state)
        got.append(ops.compressed_attention(*tokens, *sequence, cache, text.table, chosen, RATIO, scale=0.3))
    for position, row in enumerate(torch.cat(got)):
        visible = list(range((position + 1) // RATIO)) if kind != "window" else []
        if kind == "chosen":
            visible = [entry for entry in visible if entry in choice[position, 0].tolist()]
        torch.testing.assert_close(
            row.double(), text.attention(position, visible), rtol=1e-5, atol=1e-5, msg=f"at {position}"
        )
    assert state[:2].isnan().all()


@VENDORS
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_indexer_chooses_the_best_entries_up_to_the_token(vendor_name: str, count: int) -> None:
    vendor.use(vendor_name)
    text, weights = Text(), torch.randn(LENGTH, HEADS)
    sequence = (numbers(LENGTH), numbers(LENGTH), text.table)
    got = ops.compressed_indexer(text.query, text.cache, weights, *sequence, RATIO, count)
    assert got.shape == (LENGTH, 1, count)
    for position in range(LENGTH):
        entries = text.entries[: (position + 1) // RATIO].double()
        products = (text.query[position].double() @ entries.t()).relu()
        scores = (weights[position].double() @ products).tolist()
        best = sorted(range(len(scores)), key=lambda entry: (-scores[entry], entry))[:count]
        assert got[position, 0].tolist() == sorted(best) + [-1] * (count - len(best))


@VENDORS
def test_sinkhorn_is_that_of_transformers(vendor_name: str) -> None:
    vendor.use(vendor_name)
    torch.manual_seed(0)
    config = DeepseekV4Config(hidden_size=16, hc_mult=4, hc_sinkhorn_iters=5, num_hidden_layers=1)
    layer = DeepseekV4HyperConnection(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    streams = torch.randn(1, 9, 4, 16)
    with torch.no_grad():
        _, expected, _ = layer(streams)
        mixes = torch.nn.functional.linear(layer.input_norm(streams.flatten(2)), layer.fn)
        scores = mixes[..., 8:] * layer.scale[2] + layer.base[8:]
    got = ops.sinkhorn(scores.unflatten(-1, (4, 4)), 5, config.hc_eps)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
