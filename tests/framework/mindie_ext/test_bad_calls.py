"""Calls that cannot be served: which argument is named, and that sequences and pool stay as they were."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dlinfer.errors import DlinferError, UnsupportedFeatureError
from dlinfer.framework.mindie_ext import (
    GenerationParams,
    GeneratorTorch,
    InputMetadata,
    KVCacheSettings,
    Request,
    WarmupParams,
)
from dlinfer.framework.mindie_ext.batch.request import sampling_record
from dlinfer.framework.mindie_ext.errors import (
    AdapterError,
    GeneratorCallError,
    PoolMissingError,
    SamplingError,
    SwapError,
)
from dlinfer.framework.mindie_ext.sampling import SamplingData
from tests.e2e.harness import Lab
from tests.framework.mindie_ext.generators import Blocks, config_of, with_blocks


@pytest.fixture(scope="module")
def generator(lab: Lab) -> GeneratorTorch:
    """Sequence 1 of three tokens was prefilled; sequence 2 has the first of two pieces."""
    made = with_blocks(GeneratorTorch(config_of(lab.model("qwen2"), max_seq_len=64, max_input_len=64)), 16, 2)
    blocks = Blocks(16)
    made.prefill([blocks.request(1, [5, 6, 7], 20)])
    piece = blocks.request(2, [8, 9, 10, 11], 20)
    piece.split_start_position, piece.split_end_position, piece.last_prompt = 0, 2, False
    made.generate_mix([piece], np.asarray([True]))
    return made


def good_forward() -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([5, 6, 7]),
        "position_ids": torch.tensor([0, 1, 2]),
        "is_prefill": True,
        "block_tables": torch.tensor([[9]]),
        "slots": torch.tensor([144, 145, 146]),
        "input_lengths": torch.tensor([3]),
        "max_seq_len": 3,
    }


FORWARDS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": torch.tensor([5.0, 6.0, 7.0])}, "input_ids"),
    ({"input_ids": torch.tensor([[5, 6, 7]])}, "input_ids"),
    ({"input_ids": torch.tensor([5, 6, 1000])}, "input_ids"),
    ({"input_ids": torch.tensor([5, -1, 7])}, "input_ids"),
    ({"input_ids": torch.zeros(0, dtype=torch.int64)}, "input_ids"),
    ({"position_ids": torch.tensor([0, 1])}, "position_ids"),
    ({"position_ids": torch.tensor([0, 1, -2])}, "position_ids"),
    ({"position_ids": torch.tensor([0.0, 1.0, 2.0])}, "position_ids"),
    ({"block_tables": torch.tensor([9])}, "block_tables"),
    ({"block_tables": torch.tensor([[9], [10]])}, "block_tables"),
    ({"block_tables": torch.tensor([[16]])}, "block_tables"),
    ({"block_tables": torch.tensor([[-1]])}, "block_tables"),
    ({"block_tables": torch.zeros(1, 0, dtype=torch.int64)}, "block_tables"),
    ({"slots": torch.tensor([144, 145])}, "slots"),
    ({"slots": torch.tensor([144, 145, 256])}, "slots"),
    ({"slots": torch.tensor([True, True, True])}, "slots"),
    ({"input_lengths": torch.tensor([4])}, "input_lengths"),
    ({"input_lengths": torch.tensor([[3]])}, "input_lengths"),
    ({"input_lengths": torch.tensor([2]), "q_lens": torch.tensor([3])}, "input_lengths"),
    ({"q_lens": torch.tensor([2, 1])}, "q_lens"),
    (
        {"input_lengths": torch.tensor([3, 3]), "q_lens": torch.tensor([3, 0])}
        | {"block_tables": torch.tensor([[9], [10]])},
        "q_lens",
    ),
    ({"is_prefill": False, "q_lens": torch.tensor([3])}, "is_prefill"),
    ({"lm_head_indices": torch.tensor([3])}, "lm_head_indices"),
    ({"lm_head_indices": torch.tensor([-1])}, "lm_head_indices"),
    ({"lm_head_indices": torch.zeros(0, dtype=torch.int64)}, "lm_head_indices"),
    ({"adapter_ids": ["a", "b"]}, "adapter_ids"),
    ({"mystery": 1}, "mystery"),
]


@pytest.mark.parametrize(
    ("changes", "argument"), FORWARDS, ids=[f"{i}-{one[1]}" for i, one in enumerate(FORWARDS)]
)
def test_forward_tensor_names_the_argument(
    generator: GeneratorTorch, changes: dict[str, Any], argument: str
) -> None:
    cache = generator.pool("test").npu_cache
    before = [one.clone() for layer in cache for one in layer]
    with pytest.raises(GeneratorCallError) as raised:
        generator.forward_tensor(kv_cache=cache, **(good_forward() | changes))
    assert raised.value.fields["argument"] == argument
    assert all(
        torch.equal(one, other)
        for one, other in zip(before, (t for layer in cache for t in layer), strict=True)
    )


def test_the_good_forward_is_good(generator: GeneratorTorch) -> None:
    logits = generator.forward_tensor(kv_cache=generator.pool("test").npu_cache, **good_forward())
    assert logits.shape == (3, generator.model_wrapper.vocab_size)


def test_a_cache_of_another_model(generator: GeneratorTorch) -> None:
    cache = generator.pool("test").npu_cache
    for wrong in (
        cache[:1],
        [(k[:, :8], v[:, :8]) for k, v in cache],
        [(k.half(), v.half()) for k, v in cache],
    ):
        with pytest.raises(GeneratorCallError) as raised:
            generator.forward_tensor(kv_cache=wrong, **good_forward())
        assert raised.value.fields["argument"] == "kv_cache"


def request(number: int, prompt: Any, blocks: list[int], sampling: Any = None, **params: Any) -> Request:
    fields: dict[str, Any] = {"max_new_tokens": 4} | params
    made = Request.request_from_token(prompt, sampling, GenerationParams(**fields), number)
    made.block_tables = np.asarray(blocks, dtype=np.int32)
    return made


def piece(number: int, start: int, end: int) -> Request:
    made = request(number, [8, 9, 10, 11], [2])
    made.split_start_position, made.split_end_position = start, end
    return made


def twice(metadata: InputMetadata, **changes: Any) -> InputMetadata:
    for name, value in changes.items():
        setattr(metadata, name, value)
    return metadata


STEPS: dict[str, tuple[Callable[[GeneratorTorch], Any], type[DlinferError], str]] = {
    "a sequence that was not prefilled": (
        lambda g: g.decode([request(77, [5], [3])]),
        GeneratorCallError,
        "77",
    ),
    "a sequence whose prompt is in pieces": (
        lambda g: g.decode([request(2, [5], [3])]),
        GeneratorCallError,
        "incomplete prefill",
    ),
    "a piece that begins elsewhere": (
        lambda g: g.generate_mix([piece(2, 3, 4)], np.asarray([True])),
        GeneratorCallError,
        "split_start_position",
    ),
    "a piece of an unknown sequence": (
        lambda g: g.generate_mix([piece(78, 2, 4)], np.asarray([True])),
        GeneratorCallError,
        "unknown",
    ),
    "a piece of nothing": (
        lambda g: g.generate_mix([piece(2, 2, 2)], np.asarray([True])),
        GeneratorCallError,
        "at least one token",
    ),
    "flags of another batch": (
        lambda g: g.generate_mix([piece(2, 2, 4)], np.asarray([True, True])),
        GeneratorCallError,
        "is_prefill",
    ),
    "an empty prompt": (lambda g: g.prefill([request(3, [], [3])]), GeneratorCallError, "input_ids"),
    "a prompt of floats": (lambda g: g.prefill([request(3, [1.5], [3])]), GeneratorCallError, "input_ids"),
    "a token outside the vocabulary": (
        lambda g: g.prefill([request(3, [5, 1000], [3])]),
        GeneratorCallError,
        "0 to 999",
    ),
    "a negative token": (lambda g: g.prefill([request(3, [-5], [3])]), GeneratorCallError, "input_ids"),
    "too few blocks": (lambda g: g.prefill([request(3, [5] * 17, [3])]), GeneratorCallError, "block_tables"),
    "no blocks": (
        lambda g: g.prefill([Request.request_from_token([5], None, GenerationParams(), 3)]),
        GeneratorCallError,
        "block_tables",
    ),
    "a block that there is not": (
        lambda g: g.prefill([request(3, [5], [16])]),
        GeneratorCallError,
        "below 16",
    ),
    "a block of padding": (lambda g: g.prefill([request(3, [5], [-1])]), GeneratorCallError, "below 16"),
    "one block for two": (
        lambda g: g.prefill([request(3, [5], [3]), request(4, [6], [3])]),
        GeneratorCallError,
        "two tokens in one slot",
    ),
    "one sequence twice": (
        lambda g: g.prefill([request(3, [5], [3]), request(3, [6], [4])]),
        GeneratorCallError,
        "different sequence ids",
    ),
    "longer than max_seq_len": (
        lambda g: g.prefill([request(3, [5] * 65, [3, 4, 5, 6, 7])]),
        GeneratorCallError,
        "max_seq_len",
    ),
    "more than max_batch_size": (
        lambda g: g.prefill([request(30 + n, [5], [3 + n]) for n in range(9)]),
        GeneratorCallError,
        "max_batch_size",
    ),
    "no request": (lambda g: g.prefill([]), GeneratorCallError, "at least one request"),
    "an adapter that is not loaded": (
        lambda g: g.prefill([request(3, [5], [3], adapter_id="other")]),
        AdapterError,
        "other",
    ),
    "a top_p above 1": (
        lambda g: g.prefill([request(3, [5], [3], sampling_record(do_sample=True, top_p=1.5))]),
        SamplingError,
        "top_p",
    ),
    "an unknown parameter": (
        lambda g: sampling_record(heat=1.0),
        GeneratorCallError,
        "heat",
    ),
    "best_of": (lambda g: g.prefill([request(3, [5], [3], best_of=2)]), UnsupportedFeatureError, "best_of"),
    "beam search": (
        lambda g: g.prefill([request(3, [5], [3], use_beam_search=True)]),
        UnsupportedFeatureError,
        "beam search",
    ),
    "guided decoding": (
        lambda g: g.prefill([request(3, [5], [3], response_format="{}")]),
        UnsupportedFeatureError,
        "response_format",
    ),
    "stop strings without a tokenizer": (
        lambda g: g.prefill([request(3, [5], [3], stop_strings=["end"])]),
        GeneratorCallError,
        "stop_strings",
    ),
    "a prefix cache": (
        lambda g: InputMetadata(
            1,
            np.asarray([3]),
            [np.asarray([3])],
            np.asarray([4]),
            np.asarray([[3]]),
            computed_blocks=np.asarray([1]),
        ),
        UnsupportedFeatureError,
        "prefix cache",
    ),
    "a swap of a block that there is not": (lambda g: g.swap([[[1, 16, 0]]]), SwapError, "no block"),
    "a warm-up of nothing": (
        lambda g: g.warm_up(WarmupParams(max_input_len=0)),
        GeneratorCallError,
        "max_input_len",
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_that_cannot_be_served(generator: GeneratorTorch, case: str) -> None:
    call, kind, text = STEPS[case]
    known = len(generator.store)
    tokens = [list(generator.store.get(one).tokens) for one in (1, 2)]  # pyright: ignore[reportOptionalMemberAccess]
    before = [one.clone() for layer in generator.pool("test").npu_cache for one in layer[0]]
    with pytest.raises(kind, match=text):
        call(generator)
    assert len(generator.store) == known
    assert [list(generator.store.get(one).tokens) for one in (1, 2)] == tokens  # pyright: ignore[reportOptionalMemberAccess]
    if kind is not SamplingError:  # which is found after the forward, whose slots are the new sequence's own
        after = [one for layer in generator.pool("test").npu_cache for one in layer[0]]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_step_may_be_sent_again(generator: GeneratorTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure in the middle of a decode leaves the sequence where it was."""
    blocks = Blocks(16)
    again = blocks.request(1, [5, 6, 7], 20)
    expected = int(generator.decode([again]).token_ids[0, 0])
    state = generator.store.get(1)
    assert state is not None
    state.tokens.pop()
    state.new_tokens.pop()
    state.kv_length -= 1

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(generator, "sample", broken)
        with pytest.raises(MemoryError):
            generator.decode([again])
    assert int(generator.decode([again]).token_ids[0, 0]) == expected


def test_without_a_pool(lab: Lab) -> None:
    made = GeneratorTorch(config_of(lab.model("qwen2")))
    settings = made.pool("test").kvcache_settings
    made.clear_kv_cache()
    for call in (
        lambda: made.prefill([request(1, [5], [0])]),
        lambda: made.swap([[[1, 0, 0]]]),
        made.warm_up,
    ):
        with pytest.raises(PoolMissingError, match="update_cache_policy"):
            call()
    made.update_cache_policy(KVCacheSettings(0, made.model_info, 0, settings.cache_block_bytes, 16))
    assert made.prefill([request(1, [5], [0])]).num_new_tokens.tolist() == [1]


def test_sampling_data_without_its_parameters(generator: GeneratorTorch) -> None:
    data = SamplingData.from_numpy(np.asarray([[1]]), np.asarray([[2]]), request_ids=np.asarray([8]))
    with pytest.raises(SamplingError, match="sampling_param"):
        generator.sample(torch.zeros(1, 1000), data)
