"""DeepSeek's indexer and latent attention to what it chooses, as LMDeploy's layers call them, against float64."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from lmdeploy.messages import QuantPolicy
from lmdeploy.pytorch.backends.nsa import NSAIndexFP8BuildSpec
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.engine import executor
from lmdeploy.pytorch.engine.cache_engine.schema import BlockCacheGeometry
from lmdeploy.pytorch.nn import RMSNorm
from lmdeploy.pytorch.nn.nsa import IndexerTopKFP8
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.layers.attention import PagedAttention, SparseAttention, step_metadata
from dlinfer.framework.lmdeploy_ext.layers.sparse_attention import indexer_model
from dlinfer.framework.lmdeploy_ext.layers.sparse_attention.indexer import Indexer
from dlinfer.framework.lmdeploy_ext.preflight import model
from examples.tiny_models.build import build
from tests.framework.lmdeploy_ext.layers.attention_specs import paged_spec

HEADS, SIZE, ROPE, BLOCK, EPS = 5, 12, 8, 4, 1e-6
LATENT, QUERIES = 6, 3  # of the attention: numbers of a latent, and heads of queries

# Name -> the new tokens of each sequence, and those that are in the cache already.
STEPS = {
    "prefill": ([1, 7, 13], [0, 0, 0]),
    "continued prefill": ([3, 8, 1], [9, 4, 15]),
    "decoding": ([1, 1, 1, 1], [3, 4, 17, 0]),
    "one token": ([1], [0]),
    "a whole block": ([4], [4]),
}
TOP_K = (1, 5, 40)


class Text:
    """Sequences, of which a part is cached, and what an indexer's projections make of their tokens."""

    def __init__(
        self, new: list[int], old: list[int], dtype: torch.dtype, rope_interleaved: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.new, self.old, self.dtype, self.in_pairs = new, old, dtype, rope_interleaved
        self.total = [a + b for a, b in zip(new, old, strict=True)]
        blocks = -(-max(self.total) // BLOCK)
        self.table = torch.randperm(len(new) * blocks).view(len(new), blocks)
        self.q = [torch.randn(n, HEADS, SIZE).to(dtype) for n in self.total]
        self.k = [torch.randn(n, SIZE).to(dtype) for n in self.total]
        self.weights = [torch.randn(n, HEADS).to(dtype) for n in self.total]
        self.norm = torch.randn(SIZE), torch.randn(SIZE)
        self.cache = torch.full((len(new) * blocks, BLOCK, 1, SIZE), torch.nan).to(dtype)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [N, ROPE], of both halves alike."""
        angles = positions[:, None].double() / 100 ** (torch.arange(0, ROPE, 2).double() / ROPE)
        return tuple(torch.cat((part, part), -1).to(self.dtype) for part in (angles.cos(), angles.sin()))  # pyright: ignore[reportReturnType]

    def metadata(self, new: list[int], total: list[int]) -> Any:
        return step_metadata(
            SimpleNamespace(
                is_decoding=max(new) == 1,
                q_seqlens=torch.tensor(new),
                kv_seqlens=torch.tensor(total),
                block_offsets=self.table[: len(new)].int(),
                cache_config=SimpleNamespace(kernel_block_size=BLOCK),
                input_ids=torch.zeros(1, sum(new), dtype=torch.int64),
                max_q_seqlen=max(new),
                max_kv_seqlen=max(total),
                sum_kv_seqlen=sum(total),
                kv_quant_policy=0,
                local_adapter_ids=None,
            )
        )

    def inputs(self, starts: list[int], ends: list[int]) -> list[Any]:
        """Arguments of ``forward_fused`` for the tokens from starts to ends."""

        def rows(tensors: list[Tensor]) -> Tensor:
            return torch.cat([x[a:b] for x, a, b in zip(tensors[: len(ends)], starts, ends, strict=True)])

        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        parts = rows(self.q), rows(self.k), rows(self.weights)
        return [*parts, *self.norm, *self.tables(positions), self.cache, EPS, HEADS**-0.5, self.in_pairs]

    def run(self, layer: Indexer) -> Tensor:
        """What the layer chooses for the new tokens; the older ones came in a step before."""
        there = [b for b, count in enumerate(self.old) if count]
        if there:
            assert there == list(range(len(there))), "sequences without a past come last"
            ends = self.old[: len(there)]
            layer.forward_fused(*self.inputs([0] * len(there), ends), attn_metadata=self.metadata(ends, ends))
        inputs = self.inputs(self.old, self.total)
        return layer.forward_fused(*inputs, attn_metadata=self.metadata(self.new, self.total))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [N, ..., SIZE] in float64, rotated as complex numbers, and rounded to the cache's dtype."""
        cos, sin = (part.double()[:, : ROPE // 2] for part in self.tables(positions))
        turn = torch.complex(cos, sin).view(len(positions), *[1] * (x.dim() - 2), ROPE // 2)
        first, kept = x[..., :ROPE].double(), x[..., ROPE:].double()
        pairs = (
            first.unflatten(-1, (-1, 2)) if self.in_pairs else first.unflatten(-1, (2, -1)).transpose(-1, -2)
        )
        out = torch.complex(pairs[..., 0], pairs[..., 1]) * turn
        return torch.cat((out.real, out.imag, kept), -1).to(self.dtype).double()

    def keys(self, sequence: int) -> Tensor:
        x = self.k[sequence].double()
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + EPS).sqrt()
        return self.turned(x * self.norm[0].double() + self.norm[1].double(), torch.arange(len(x)))

    def scores(self) -> list[Tensor]:
        """Of each new token, float64, for its sequence up to itself."""
        found = []
        for b, (old, total) in enumerate(zip(self.old, self.total, strict=True)):
            own, keys = torch.arange(old, total), self.keys(b)
            q, weights = self.turned(self.q[b][old:], own), self.weights[b][old:].double()
            scale = HEADS**-0.5 * SIZE**-0.5
            whole = (weights[..., None] * scale * (q @ keys.T).relu()).sum(1)
            found += [row[: position + 1] for row, position in zip(whole, own.tolist(), strict=True)]
        return found


def best(scores: Tensor, top_k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda position: (-float(scores[position]), position))[:top_k]


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("in_pairs", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("step", STEPS)
def test_the_best_positions_are_chosen(step: str, in_pairs: bool, top_k: int) -> None:
    text = Text(*STEPS[step], torch.float32, in_pairs)
    got = text.run(Indexer(top_k))
    assert (got.dtype, got.shape) == (torch.int32, (sum(text.new), top_k))
    for row, scores in zip(got.tolist(), text.scores(), strict=True):
        chosen = sorted(best(scores, top_k))
        assert row == chosen + [-1] * (top_k - len(chosen))


@pytest.mark.parametrize("step", STEPS)
def test_in_bfloat16_the_best_positions_but_for_its_rounding(step: str) -> None:
    text, top_k = Text(*STEPS[step], torch.bfloat16), 5
    got = text.run(Indexer(top_k))
    for row, scores in zip(got.tolist(), text.scores(), strict=True):
        chosen = [position for position in row if position >= 0]
        assert len(set(chosen)) == len(chosen) == min(top_k, len(scores))
        worst, wanted = scores[chosen].min(), scores[best(scores, top_k)].min()
        # Numbers of 8 bits that were halfway between two may have been rounded to the other one.
        assert worst >= wanted - 2**-7 * scores.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", STEPS)
def test_the_cache_holds_normed_and_rotated_keys(step: str, dtype: torch.dtype) -> None:
    text = Text(*STEPS[step], dtype)
    text.run(Indexer(3))
    written = torch.zeros(text.cache.shape[:2], dtype=torch.bool)
    for b, count in enumerate(text.total):
        for position, key in enumerate(text.keys(b)):
            slot = text.table[b, position // BLOCK], position % BLOCK
            written[slot] = True
            step_of_rounding = 1e-5 if dtype is torch.float32 else 2**-7
            torch.testing.assert_close(
                text.cache[slot][0].double(), key, rtol=step_of_rounding, atol=step_of_rounding / 8
            )
        assert count == written[text.table[b]].sum()
    assert text.cache[~written].isnan().all()


def test_prepared_inputs_are_scored_as_they_are() -> None:
    text = Text([6, 9], [0, 0], torch.float32)
    want = text.run(Indexer(4))
    q = torch.cat([text.turned(x, torch.arange(len(x))) for x in text.q]).float()
    k = torch.cat([text.keys(b) for b in range(2)]).float()
    weights, cache = torch.cat(text.weights) * HEADS**-0.5, torch.full_like(text.cache, torch.nan)
    got = Indexer(4).forward(q, k, weights, cache, text.metadata(text.new, text.total))
    assert torch.equal(got, want)
    torch.testing.assert_close(cache, text.cache, equal_nan=True, rtol=1e-5, atol=1e-5)


class Latents:
    """Latents in pages behind a text's, and queries for its new tokens."""

    def __init__(self, text: Text) -> None:
        self.text, self.width = text, LATENT + ROPE
        self.rows = [torch.randn(n, 1, self.width) for n in text.total]
        self.query = torch.randn(sum(text.new), QUERIES, self.width)
        self.cache = torch.full((*text.cache.shape[:3], self.width), torch.nan)
        for b, old in enumerate(text.old):
            for position in range(old):
                self.cache[text.table[b, position // BLOCK], position % BLOCK] = self.rows[b][position]

    def run(self, layer: PagedAttention | SparseAttention, **options: Any) -> Tensor:
        key = torch.cat([x[old:] for x, old in zip(self.rows, self.text.old, strict=True)])
        caches = self.cache, self.cache[..., :LATENT]
        metadata = self.text.metadata(self.text.new, self.text.total)
        return layer.forward(self.query.clone(), key, key[..., :LATENT], *caches, metadata, **options)

    def expected(self, chosen: Tensor) -> Tensor:
        out, token = [], 0
        for rows, old, total in zip(self.rows, self.text.old, self.text.total, strict=True):
            for position in range(old, total):
                places = [place for place in chosen[token].tolist() if 0 <= place <= position]
                keys = rows[places, 0].double()
                weights = (self.query[token].double() @ keys.T * self.width**-0.5).softmax(-1)
                out.append(weights @ keys[:, :LATENT])
                token += 1
        return torch.stack(out).float()


def latent_spec(top_k: int | None = 5, **changes: Any) -> Any:
    sizes = {"num_heads": QUERIES, "num_kv_heads": 1, "head_dim": LATENT + ROPE, "v_head_dim": LATENT}
    return paged_spec(mla_index_topk=top_k, **{**sizes, **changes})


@pytest.mark.parametrize("top_k", TOP_K)
@pytest.mark.parametrize("step", STEPS)
def test_attention_is_to_the_chosen_positions_alone(step: str, top_k: int) -> None:
    text = Text(*STEPS[step], torch.float32)
    chosen, latents = text.run(Indexer(top_k)), Latents(text)
    got = latents.run(PagedAttention.from_spec(latent_spec(top_k)), nsa_indices=chosen)
    torch.testing.assert_close(got, latents.expected(chosen), rtol=1e-5, atol=1e-5)
    if top_k > max(text.total):
        dense = latents.run(PagedAttention.from_spec(latent_spec(None)))
        torch.testing.assert_close(got, dense, rtol=1e-5, atol=1e-5)


def test_a_graph_has_both_as_ops() -> None:
    """In one graph for every length, with a cache that it writes and reads."""

    def layer(inputs: list[Any], metadata: Any, latents: list[Tensor]) -> Tensor:
        chosen = indexer.forward_fused(*inputs, attn_metadata=metadata)
        query, key, cache = latents
        return attention.forward(
            query, key, key[..., :LATENT], cache, cache[..., :LATENT], metadata, nsa_indices=chosen
        )

    indexer, attention = Indexer(5), PagedAttention.from_spec(latent_spec())
    compiled = torch.compile(layer, backend="dlinfer", fullgraph=True, dynamic=True)
    for new in ([7, 13], [2, 30]):
        text = Text(new, [0, 0], torch.float32)
        latents = Latents(text)
        metadata, inputs = text.metadata(text.new, text.total), text.inputs(text.old, text.total)
        rest = [latents.query, torch.cat(latents.rows), latents.cache]
        want = layer(inputs, metadata, [x.clone() for x in rest])
        filled = text.cache.clone()
        text.cache.fill_(torch.nan)
        with torch.no_grad():
            got = compiled(inputs, metadata, rest)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(text.cache, filled, equal_nan=True, rtol=1e-5, atol=1e-5)


def index_spec(**changes: Any) -> NSAIndexFP8BuildSpec:
    return NSAIndexFP8BuildSpec(**{"top_k": 5, "softmax_scale": 0.3, **changes})


@pytest.mark.usefixtures("on_cpu")
def test_the_cache_is_of_the_models_dtype_and_of_kernel_blocks() -> None:
    layer = Indexer.from_spec(index_spec())
    layer.dtype = torch.float16
    (request,) = layer.get_block_cache_requests(BlockCacheGeometry(64, 16), 24)
    assert (request.shape, request.dtype) == ((16, 1, 24), torch.float16)


def test_what_the_ops_lack_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="with fill=0"):
        Indexer.from_spec(index_spec(fill=0))
    changes: dict[str, Any] = {
        "sliding_window": 4,
        "logit_softcapping": 2.0,
        "alibi": True,
    }
    for feature, value in changes.items():
        with pytest.raises(UnsupportedFeatureError, match=f"sparse attention with {feature}"):
            PagedAttention.from_spec(latent_spec(**{feature: value}))
    with pytest.raises(UnsupportedFeatureError, match="more than one head of keys"):
        PagedAttention.from_spec(latent_spec(num_kv_heads=2))
    text = Text([3], [0], torch.float32)
    layer = PagedAttention.from_spec(latent_spec())
    assert type(layer) is SparseAttention
    with pytest.raises(UnsupportedFeatureError, match="sparse attention with sinks"):
        Latents(text).run(layer, nsa_indices=text.run(Indexer(5)), learnable_sink=torch.zeros(QUERIES))


# --- what LMDeploy's classes make themselves


def model_config(family: str, dtype: Any = "float32", **fields: Any) -> ModelConfig:
    given = {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": 2, "index_topk": 7}
    hf_config = getattr(transformers, f"{family}Config")(**given, **fields)
    return ModelConfig.from_hf_config(hf_config, dtype=dtype, device_type="cpu")


@pytest.fixture
def on_cpu() -> None:
    from lmdeploy import PytorchEngineConfig

    PytorchEngineConfig(device_type="cpu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_latents_are_cached_in_the_models_dtype(family: str, dtype: str) -> None:
    config = model_config(family, dtype)
    assert (config.mla_index_topk, config.mla_kv_cache_dtype, config.use_flash_mla) == (7, None, False)
    assert config.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_layers_and_caches_have_the_models_dtype(family: str, dtype: str, tmp_path: Path) -> None:
    """LMDeploy's have float32 for norms, and bfloat16 for the indexer's projection and for latents."""
    build(family, tmp_path / "model")
    built = model.build(tmp_path / "model", model.engine_config("cpu", dtype=dtype))
    wanted = getattr(torch, dtype)
    norms = [one for one in built.module.modules() if isinstance(one, RMSNorm)]
    layers: list[Any] = [one for one in built.module.modules() if isinstance(one, IndexerTopKFP8)]
    joint = [value for name, value in built.module.named_parameters() if "wk_weights_proj" in name]
    assert len(layers) == len(joint) == 2
    assert {one.weight.dtype for one in norms} | {one.dtype for one in joint} == {wanted}
    assert {one.index_impl.dtype for one in layers} == {wanted}
    of_latents = built.config.num_layers * (32 + 8)
    assert built.block_bytes == 64 * (of_latents + 2 * 16) * wanted.itemsize


@pytest.mark.usefixtures("on_cpu")
def test_glms_indexer_turns_pairs_as_in_transformers() -> None:
    given: list[dict[str, Any]] = [{}, {"indexer_rope_interleave": True}]
    for fields in given:
        assert model_config("GlmMoeDsa", **fields).hf_config.indexer_rope_interleave is True
    with pytest.raises(UnsupportedFeatureError, match="indexer_rope_interleave=False"):
        model_config("GlmMoeDsa", indexer_rope_interleave=False)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("policy", [4, 8, 16, 17])
def test_quantised_caches_are_refused_before_lmdeploy_takes_them_for_another(policy: int) -> None:
    """Of 16 it makes a packed cache for CUDA, and goes on."""
    config = model_config("DeepseekV32")
    cache: Any = SimpleNamespace(quant_policy=QuantPolicy(policy))
    with pytest.raises(
        UnsupportedFeatureError, match=re.escape(f"quant_policy={policy} with sparse attention")
    ):
        executor._finalize_sparse_mla_cache_policy([config], cache)
    cache.quant_policy = QuantPolicy.NONE
    executor._finalize_sparse_mla_cache_policy([config], cache)
    assert config.mla_kv_cache_dtype is None


def test_the_indexers_caches_stand_where_values_would_and_in_one_list_for_all_steps() -> None:
    binding = SimpleNamespace(cache_name="dsa_indexer_k", consumer_row=3)
    full = SimpleNamespace(indexer_topk=SimpleNamespace(_block_cache_binding=binding))
    layers = [SimpleNamespace(self_attn=SimpleNamespace(indexer=one)) for one in (full, None)]
    owner = SimpleNamespace(model=SimpleNamespace(layers=layers))
    view = SimpleNamespace(row=lambda name, row: (name, row))
    given = [("keys 0", "values 0"), ("keys 1", "values 1")]
    found = indexer_model._with_indexers(owner, given, view)
    assert found == [("keys 0", ("dsa_indexer_k", 3)), ("keys 1", "values 1")]
    assert indexer_model._with_indexers(owner, given, view) is found
