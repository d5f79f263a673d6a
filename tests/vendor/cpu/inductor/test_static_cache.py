"""transformers' models with a static cache: what of a step runs in chains, and that its results are eager mode's."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from dlinfer.vendor.cpu import native
from tests.graph.compiling import compiled, interpreted_engine, use_engine
from tests.vendor.cpu.inductor.test_chained_models import Recording

BATCH, PLACES, PROMPT, STEPS = 2, 40, 7, 3


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, graph_mode: None) -> Recording:
    reason = native.why_not()
    if reason is not None:
        pytest.skip(reason)
    interpreted_engine(monkeypatch)
    made = Recording()
    use_engine(monkeypatch, made)
    return made


def model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    llama: Any = LlamaForCausalLM(config)
    return llama.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def generated(llama: Any, forward: Any) -> list[Tensor]:
    """Logits of a prompt's last token and of some steps behind it."""
    cache = StaticCache(llama.config, max_cache_len=PLACES)
    cache.early_initialization(BATCH, 2, 16, llama.dtype, llama.device)
    ids = torch.arange(BATCH * PROMPT).view(BATCH, PROMPT)
    logits = [forward(ids, past_key_values=cache, logits_to_keep=1).logits]
    for step in range(STEPS):
        at = torch.full((BATCH, 1), PROMPT + step)
        ids = logits[-1][:, -1:].argmax(-1)
        logits.append(forward(ids, past_key_values=cache, position_ids=at, logits_to_keep=1).logits)
    return logits


# Of one layer of 64 numbers. Products of 16-bit numbers are rounded at other places than eagerly, once a kernel.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_steps_are_eager_ones(dtype, tolerance, engine: Recording) -> None:
    llama = model(dtype)
    torch._dynamo.reset()
    ours = generated(llama, compiled(llama))
    for got, want in zip(ours, generated(llama, llama), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    assert engine.told().count(" native scaled_dot_product_attention") == len(engine.programs) >= 2


def test_a_layer_s_step_is_in_chains(engine: Recording) -> None:
    llama = model(torch.bfloat16)
    torch._dynamo.reset()
    generated(llama, compiled(llama))
    assert_expected_inline(
        Recording.told(_last(engine)),
        """\
chain
  native embedding
  native rms_norm
  native linears
  layout
  layout
  view
  view
cluster
chain
  native apply_rotary_pos_emb
cluster
chain
  native add_whole_
  layout
  transpose.int
  native index_copy_
  layout
  view
  transpose.int
  native index_copy_
  layout
  transpose.int
  reshape
cluster
chain
  expand
  native scaled_dot_product_attention
  layout
  reshape
  transpose.int
  reshape
  native linear
  native add_rms_norm
  layout
  native linears
  layout
  layout
  native silu_mul
  native linear
  layout
add.Tensor
check aten.add.Tensor
chain
  layout
  native rms_norm
  native linear""",
    )


def _last(engine: Recording) -> Recording:
    last = Recording()
    last.programs = engine.programs[-1:]
    return last
