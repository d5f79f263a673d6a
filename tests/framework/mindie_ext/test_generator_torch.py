"""What MindIE's document says of ``GeneratorTorch``, sentence by sentence."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dlinfer.framework.mindie_ext import (
    CachePool,
    FinishReason,
    GeneratorBackend,
    GeneratorTorch,
    ModelConfig,
    SamplingMetadata,
    generator_torch,
)
from dlinfer.framework.mindie_ext.batch.request import sampling_record
from dlinfer.framework.mindie_ext.errors import GeneratorCallError, ModelConfigError
from tests.e2e.harness import Lab
from tests.framework.mindie_ext.generators import Blocks, config_of, run

PROMPT = [5, 17, 33, 60]


@pytest.fixture(scope="module")
def generator(lab: Lab) -> GeneratorTorch:
    return GeneratorTorch(
        config_of(lab.model("llama"), load_tokenizer=True, num_threads=3, inference_mode="any")
    )


def test_making_one_loads_model_and_sampler_and_allocates_the_pool(
    generator: GeneratorTorch, lab: Lab
) -> None:
    model = generator.model_wrapper.compiled.model.model
    stored = AutoTokenizer.from_pretrained(lab.model("llama"))
    assert generator.tokenizer.get_vocab() == stored.get_vocab()
    assert sum(one.numel() for one in model.parameters()) > 10_000
    assert not any(one.requires_grad for one in model.parameters())
    pool = generator.pool("test")
    settings = pool.kvcache_settings
    assert isinstance(pool, CachePool)
    assert len(pool.npu_cache) == settings.num_layers == 2
    assert pool.npu_cache[0][0].shape[0] == settings.num_npu_blocks > 0


def test_it_is_a_generator_backend_whose_sample_it_has() -> None:
    assert issubclass(GeneratorTorch, GeneratorBackend)
    assert GeneratorTorch.sample is GeneratorBackend.sample
    parameters = list(inspect.signature(GeneratorTorch.forward_tensor).parameters)
    assert parameters[1:10] == [
        *("input_ids", "position_ids", "is_prefill", "kv_cache", "block_tables", "slots", "input_lengths"),
        *("max_seq_len", "lm_head_indices"),
    ]


def test_the_class_has_no_pool_and_each_object_its_own(generator: GeneratorTorch) -> None:
    assert GeneratorTorch.cache_pool is None
    assert generator.cache_pool is not None


def test_the_config_is_checked_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def check(model_config: Any) -> ModelConfig:
        order.append("check")
        return ModelConfig.model_construct(**model_config)

    def base(self: Any, config: ModelConfig) -> None:
        order.append("base")
        raise InterruptedError

    monkeypatch.setattr(generator_torch, "check_model_config", check)
    monkeypatch.setattr(GeneratorBackend, "__init__", base)
    with pytest.raises(InterruptedError):
        GeneratorTorch({"rank": 0})
    assert order == ["check", "base"]


def test_it_shows_what_its_model_wrapper_has(generator: GeneratorTorch) -> None:
    for name in ("tokenizer", "device", "rank", "adapter_manager"):
        assert getattr(generator, name) is getattr(generator.model_wrapper, name)
    assert generator.device == torch.device("cpu")
    assert generator.rank == 0
    assert generator.adapter_manager.names == []


def test_num_threads_is_that_of_post_processing(generator: GeneratorTorch, lab: Lab) -> None:
    assert generator.sampler._threads._max_workers == 3
    assert GeneratorTorch(config_of(lab.model("llama"))).sampler._threads._max_workers == 8


def test_inference_mode_is_kept(generator: GeneratorTorch) -> None:
    assert generator.config.inference_mode == "any"


def test_max_position_embeddings_bounds_sequences(lab: Lab) -> None:
    made = GeneratorTorch(config_of(lab.model("llama"), max_position_embeddings=6))
    assert made.max_position_embeddings == 6
    blocks = Blocks(16)
    with pytest.raises(GeneratorCallError, match="at most 6 tokens"):
        made.prefill([blocks.request(1, [5] * 7, 2)])
    request = blocks.request(2, PROMPT, 40)
    assert made.prefill([request]).finish_reason[0] == FinishReason.CONTINUE
    assert made.decode([request]).finish_reason[0] == FinishReason.REACH_MAX_SEQ_LEN


def test_load_tokenizer_and_tokenizer_path(lab: Lab, tmp_path: Path) -> None:
    model = lab.model("llama")
    assert GeneratorTorch(config_of(model)).tokenizer is None
    other = tmp_path / "other"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<of its own>"])
    tokenizer.save_pretrained(other)
    made = GeneratorTorch(config_of(model, load_tokenizer=True, tokenizer_path=str(other)))
    assert "<of its own>" in made.tokenizer.get_vocab()


_CODE = {
    "configuration_own.py": """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "their_own"
""",
    "modeling_own.py": """
from transformers import LlamaForCausalLM
from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""",
}


def test_code_of_the_folder_runs_where_it_is_trusted(
    generator: GeneratorTorch, lab: Lab, tmp_path: Path
) -> None:
    folder = tmp_path / "own_model"
    shutil.copytree(lab.model("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "their_own", "auto_map": own}))
    for name, code in _CODE.items():
        (folder / name).write_text(code)
    with pytest.raises(ModelConfigError, match="trust_remote_code"):
        GeneratorTorch(config_of(folder))
    trusted = GeneratorTorch(config_of(folder, trust_remote_code=True))
    assert type(trusted.model_wrapper.compiled.model.model).__name__ == "OwnForCausalLM"
    assert run(trusted, [Blocks(16).request(1, PROMPT, 8)]) == run(
        generator, [Blocks(16).request(1, PROMPT, 8)]
    )


def test_errors_are_raised_as_exceptions(generator: GeneratorTorch) -> None:
    with pytest.raises(ModelConfigError):
        GeneratorTorch({})
    with pytest.raises(GeneratorCallError):
        generator.decode([Blocks(16).request(99, PROMPT, 4)])


# --- the published methods that the document names without describing them


def test_build_inputs_by_the_chat_template(generator: GeneratorTorch) -> None:
    conversation = [{"role": "user", "content": "the first"}]
    tokenizer = generator.tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (ids,) = generator.build_inputs([conversation])
    assert tokenizer.decode(ids) == "<user>the first"


def test_to_tensor(generator: GeneratorTorch) -> None:
    tensor = generator.to_tensor(np.asarray([1, 2]))
    assert (tensor.tolist(), tensor.device) == ([1, 2], generator.device)


def test_seeded_draws_are_those_of_the_sampler_alone(generator: GeneratorTorch) -> None:
    """Logits by forward, tokens by sample, step by step: what prefill and decode give."""
    blocks = Blocks(16)
    record = sampling_record(do_sample=True, temperature=1.3, top_k=30, top_p=0.9, repetition_penalty=1.2)
    tokens = run(generator, [blocks.request(7, PROMPT, 10, record, seed=11)])[0]
    model = generator.model_wrapper.compiled.model.model
    model.set_attn_implementation("eager")
    ids: list[int] = list(PROMPT)
    for _ in range(10):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1]
        metadata = SamplingMetadata.from_numpy(
            [np.asarray([8])],
            do_sample=np.asarray([True]),
            temperature=np.asarray([1.3]),
            top_k=np.asarray([30]),
            top_p=np.asarray([0.9]),
            repetition_penalty=np.asarray([1.2]),
            seeds=np.asarray([11]),
        )
        metadata.update_token_ids(np.asarray([ids]), None)
        output: Any = generator.sample(logits, metadata)
        ids.append(int(output.token_ids[0]))
    model.set_attn_implementation("dlinfer_paged")
    generator.clear_cache([8])
    assert tokens == ids[len(PROMPT) :]


def test_ends_of_a_text(generator: GeneratorTorch) -> None:
    expected = run(generator, [Blocks(16).request(1, PROMPT, 12)])[0]
    stop = expected[3]
    first = expected.index(stop) + 1
    assert run(generator, [Blocks(16).request(1, PROMPT, 12, stop_token_ids=[stop])])[0] == expected[:first]
    pair = expected[1:3]
    assert run(generator, [Blocks(16).request(1, PROMPT, 12, stop_token_ids=[pair])])[0] == expected[:3]
    ended = GeneratorTorch(config_of(Path(generator.config.model_id), eos_token_id=[stop]))
    assert run(ended, [Blocks(16).request(1, PROMPT, 12, ignore_eos=None)])[0] == expected[:first]
    assert run(ended, [Blocks(16).request(1, PROMPT, 12)])[0] == expected


def test_stop_strings_and_how_much_of_the_text_they_take(generator: GeneratorTorch) -> None:
    expected = run(generator, [Blocks(16).request(1, PROMPT, 12)])[0]
    text = generator.tokenizer.decode(expected[:5], skip_special_tokens=True)
    stop = text.strip()[-3:]
    for keep, left in ((False, text.index(stop)), (True, text.index(stop) + len(stop))):
        request = Blocks(16).request(1, PROMPT, 12, stop_strings=[stop], include_stop_str_in_output=keep)
        tokens, output = [], generator.prefill([request])
        while True:
            tokens.append(int(output.token_ids[0, 0]))
            if output.finish_reason[0]:
                break
            output = generator.decode([request])
        whole = generator.tokenizer.decode(tokens, skip_special_tokens=True)
        assert output.finish_reason[0] == FinishReason.STOP_STRINGS
        assert len(whole) - int(output.truncation_indices[0]) == left
        generator.clear_cache([1])


def test_log_probabilities_of_a_step(generator: GeneratorTorch) -> None:
    record = sampling_record(top_logprobs=3)
    output = generator.prefill([Blocks(16).request(1, PROMPT, 4, record)])
    assert output.top_token_ids.shape == (1, 1, 3)
    assert output.token_ids[0, 0] == output.top_token_ids[0, 0, 0]
    assert output.logprobs[0, 0] == output.top_logprobs[0, 0, 0] == output.cumulative_logprobs[0] < 0
    assert output.num_top_tokens.tolist() == [3]
    assert output.eos_info.tolist() == [[0, 1]]
    generator.clear_cache([1])


def test_defaults_of_the_config_are_for_requests_that_say_nothing(lab: Lab) -> None:
    defaults = {"do_sample": True, "temperature": 1.5, "top_k": 40, "ignore_eos": True}
    made = GeneratorTorch(config_of(lab.model("llama"), **defaults))
    record = sampling_record(do_sample=True, temperature=1.5, top_k=40)
    blocks = Blocks(16)
    silent = blocks.request(1, PROMPT, 10, seed=3, ignore_eos=None)
    says = blocks.request(2, PROMPT, 10, record, seed=3)
    greedy = blocks.request(3, PROMPT, 10, sampling_record(), seed=3)
    first, second, third = run(made, [silent, says, greedy])
    assert first == second != third
