"""Parts of AWQ layers: of each tensor a rank has its own heads or groups, and all ranks together have all of it."""

from types import SimpleNamespace

import pytest
import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.ranks import awq_parts

OUT = {"q": 64, "k": 32, "v": 32}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(activation, "_active", "cpu")


def loaded(kind: str, ranks: int, copies: int) -> list[torch.Tensor]:
    """What each rank has of a joined q, k and v. copies: the ranks that have the same head of k and v."""
    load = awq_parts._load_qkv.build(lambda *_: pytest.fail("LMDeploy's own"))
    per_word = 8 if kind == "qweight" else 1
    own = [OUT["q"] // ranks, *(OUT[part] * copies // ranks for part in "kv")]
    parts = []
    for rank in range(ranks):
        shape = (sum(own) // per_word,) if kind == "bias" else (3, sum(own) // per_word)
        param = SimpleNamespace(data=torch.zeros(shape, dtype=torch.int32), _weight_type=kind)
        layer = SimpleNamespace(
            get_tp_world_rank=lambda rank=rank: (ranks, rank),
            num_replicate_kv_heads=copies,
            elem_per_int=8,
            all_out_features=own,
            out_names_map={"q": 0, "k": 1, "v": 2},
        )
        for part, size in OUT.items():
            load(layer, param, whole(kind, part, size // per_word), part)
        parts.append(param.data)
    return parts


def whole(kind: str, part: str, size: int) -> torch.Tensor:
    row = torch.arange(size, dtype=torch.int32) + 1000 * "qkv".index(part)
    return row if kind == "bias" else torch.stack([row + 100 * i for i in range(3)])


@pytest.mark.parametrize("kind", ["qweight", "qzeros", "scales", "bias"])
def test_two_ranks_have_halves_of_heads(kind):
    kind_of_words = "qweight" if kind == "qzeros" else kind
    first, second = loaded(kind_of_words, 2, 1)
    size = 8 if kind_of_words == "qweight" else 1
    for part, begin in (("q", 0), ("k", 32 // size), ("v", 48 // size)):
        full = whole(kind_of_words, part, OUT[part] // size)
        half = full.shape[-1] // 2
        assert torch.equal(first[..., begin : begin + half], full[..., :half])
        assert torch.equal(second[..., begin : begin + half], full[..., half:])


def test_ranks_share_a_head():
    parts = loaded("scales", 4, 2)
    assert torch.equal(parts[0][:, 16:], parts[1][:, 16:])
    assert torch.equal(parts[2][:, 16:], parts[3][:, 16:])
    assert not torch.equal(parts[1][:, 16:], parts[2][:, 16:])
    assert torch.equal(torch.cat([part[:, :16] for part in parts], 1), whole("scales", "q", 64))


def test_a_bias_is_added_once():
    load = awq_parts._load_rows.build(lambda *_: pytest.fail("LMDeploy's own"))
    bias, words = torch.arange(1.0, 9.0), torch.arange(64.0).reshape(16, 4)
    biases, parts = torch.zeros(4, 8), torch.zeros(4, 4, 4)
    for rank in range(4):
        load(SimpleNamespace(), torch.nn.Parameter(biases[rank], requires_grad=False), bias, rank, 4)
        load(SimpleNamespace(), torch.nn.Parameter(parts[rank], requires_grad=False), words, rank, 4)
    assert torch.equal(biases.sum(0), bias)
    assert torch.equal(parts.flatten(0, 1), words)
