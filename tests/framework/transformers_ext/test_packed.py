"""``attn_implementation="dlinfer_packed"``: texts end to end against each text alone, and what is refused."""

from typing import Any

import pytest
import torch
import transformers

import dlinfer
from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.transformers_ext import Packing

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bidirectional": ("Bert", {}),
    "bidirectional window": ("ModernBert", {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "causal": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "causal window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
}
LENGTHS = [1, 23, 9, 2]


def model_of(name: str, attention: str) -> Any:
    prefix, more = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{prefix}Config")(**SIZES, **more)
    model = getattr(transformers, f"{prefix}Model")(config).eval()
    model.set_attn_implementation(attention)
    return model


def packing(lengths: list[int]) -> Packing:
    counted = torch.tensor(lengths)
    return Packing(counted.cumsum(0), counted)


@pytest.mark.parametrize("name", MODELS)
def test_texts_do_not_see_each_other(name: str):
    dlinfer.transformers.register_attention()
    texts = [torch.randint(1, 64, (1, length)) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    alone, packed = model_of(name, "eager"), model_of(name, "dlinfer_packed")
    with torch.inference_mode():
        expected = torch.cat([alone(input_ids=ids).last_hidden_state for ids in texts], dim=1)
        hidden = packed(
            input_ids=torch.cat(texts, dim=1), position_ids=positions, packing=packing(LENGTHS)
        ).last_hidden_state
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


def test_refused_calls():
    dlinfer.transformers.register_attention()
    model = model_of("bidirectional", "dlinfer_packed")
    ids = torch.ones(1, 4, dtype=torch.int64)
    with torch.inference_mode():
        with pytest.raises(UnsupportedFeatureError, match="without packing"):
            model(input_ids=ids)
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        with pytest.raises(UnsupportedFeatureError, match="attention mask"):
            model(input_ids=ids, attention_mask=mask, packing=packing([4]))
