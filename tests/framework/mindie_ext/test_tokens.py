"""Greedy tokens and logits of generators against transformers, which answers from a process of its own."""

import numpy as np
import pytest
import torch

from dlinfer.framework.mindie_ext import GeneratorTorch, Request
from tests.e2e.harness import Lab
from tests.framework.mindie_ext.generators import Blocks, config_of, run, with_blocks

FAMILIES = ["llama_llama3", "qwen2", "qwen3", "mixtral", "olmo2"]
LENGTHS = (1, 2, 9, 33, 80)
NEW = 24


def prompts_and_tokens(lab: Lab, family: str) -> tuple[list[list[int]], list[list[int]]]:
    model = lab.model(family)
    tokenizer = lab.tokenizer(model)
    prompts = [tokenizer.encode(text).ids for text in lab.prompts(model, LENGTHS)]
    answer = lab.reference(model, prompts=prompts, max_new_tokens=NEW)
    return prompts, [answer[f"tokens_{index}"].tolist() for index in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(lab: Lab, family: str) -> None:
    """Mixed lengths in one batch, one sequence alone, prefill and decode in one step, prompts in pieces; eagerly, and
    once more as graphs, which are compiled once."""
    prompts, expected = prompts_and_tokens(lab, family)
    generator = GeneratorTorch(config_of(lab.model(family)))
    ways = {"batch": batch, "alone": alone, "mixed": mixed, "in pieces": in_pieces}
    for name, way in ways.items():
        assert way(generator, prompts) == expected, name
    generator.warm_up()
    compiled = list(generator.model_wrapper.compiled.compilations)
    assert [phase for phase, _ in compiled] == ["prefill", "decode"]
    assert all(outcome in ("compiled", "loaded") for _, outcome in compiled)
    for name, way in ways.items():
        assert way(generator, prompts) == expected, f"{name}, as graphs"
    assert generator.model_wrapper.compiled.compilations == compiled


@pytest.mark.parametrize("block_size", [32, 128])
def test_other_block_sizes(lab: Lab, block_size: int) -> None:
    prompts, expected = prompts_and_tokens(lab, "qwen2")
    generator = GeneratorTorch(config_of(lab.model("qwen2"), block_size=block_size))
    assert batch(generator, prompts) == expected
    assert mixed(generator, prompts) == expected


def batch(generator: GeneratorTorch, prompts: list[list[int]]) -> list[list[int]]:
    blocks = Blocks(generator.config.block_size)
    return run(generator, [blocks.request(number, prompt, NEW) for number, prompt in enumerate(prompts)])


def alone(generator: GeneratorTorch, prompts: list[list[int]]) -> list[list[int]]:
    return [batch(generator, [prompt])[0] for prompt in prompts]


def mixed(generator: GeneratorTorch, prompts: list[list[int]]) -> list[list[int]]:
    """A new prompt joins in each step, while the others decode."""
    blocks = Blocks(generator.config.block_size)
    requests = [blocks.request(number, prompt, NEW) for number, prompt in enumerate(prompts)]
    return steps(generator, requests, [[(0, len(prompt))] for prompt in prompts])


def in_pieces(generator: GeneratorTorch, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of more than 7 tokens are computed 7 at a time, beside the others' decodes."""
    blocks = Blocks(generator.config.block_size)
    requests = [blocks.request(number, prompt, NEW) for number, prompt in enumerate(prompts)]
    pieces = [
        [(start, min(start + 7, len(prompt))) for start in range(0, len(prompt), 7)] for prompt in prompts
    ]
    return steps(generator, requests, pieces)


def steps(generator: GeneratorTorch, requests: list, pieces: list[list[tuple[int, int]]]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in requests]
    joined = 0
    while any(len(one) < NEW for one in tokens):
        joined = min(joined + 1, len(requests))
        step = [index for index in range(joined) if len(tokens[index]) < NEW]
        flags = [bool(pieces[index]) for index in step]
        for index in step:
            if pieces[index]:
                start, end = pieces[index].pop(0)
                requests[index].split_start_position, requests[index].split_end_position = start, end
                requests[index].last_prompt = not pieces[index]
        output = generator.generate_mix([requests[index] for index in step], np.asarray(flags))
        for row, index in enumerate(step):
            if output.num_new_tokens[row]:
                tokens[index].append(int(output.token_ids[row, 0]))
            else:
                assert output.token_ids[row, 0] == -1
                assert output.finish_reason[row] == 0
            assert bool(output.finish_reason[row]) == (len(tokens[index]) == NEW)
    generator.clear_cache(range(len(requests)))
    return tokens


def test_sequences_swapped_out_and_in_between_steps(lab: Lab) -> None:
    """Four sequences share a pool in which only two fit: each step swaps the other two to the host and back."""
    prompts, expected = prompts_and_tokens(lab, "qwen3")
    generator = with_blocks(GeneratorTorch(config_of(lab.model("qwen3"))), 14, 16)
    blocks = Blocks(16)
    requests = [blocks.request(number, prompts[4], NEW) for number in range(2)]
    size = len(blocks_of(requests[0]))
    assert 2 * size == 14
    tokens: list[list[int]] = [[], []]
    for index, request in enumerate(requests):
        request.block_tables = np.arange(index * 7, index * 7 + size)
        tokens[index].append(int(generator.prefill([request]).token_ids[0, 0]))
    for step in range(1, NEW):
        for index, request in enumerate(requests):
            there = blocks_of(request)
            generator.swap([[[1, int(block), number] for number, block in enumerate(there)]])
            for keys, values in generator.pool("test").npu_cache:
                keys[there], values[there] = torch.nan, torch.nan
            back = np.roll(there, step)
            generator.swap([[[0, number, int(block)] for number, block in enumerate(back)]])
            request.block_tables = back
            tokens[index].append(int(generator.decode([request]).token_ids[0, 0]))
    assert tokens == [expected[4], expected[4]]


def blocks_of(request: Request) -> np.ndarray:
    assert request.block_tables is not None
    return request.block_tables


def test_logits_of_forward_tensor(lab: Lab) -> None:
    """Of all tokens of a prompt, in float32: sums in another order stay within 1e-5 of the largest logit."""
    model = lab.model("llama_llama3")
    prompts, _ = prompts_and_tokens(lab, "llama_llama3")
    expected = lab.reference(model, score=[prompts[4]])["logits_0"]
    generator = GeneratorTorch(config_of(model))
    ids = torch.tensor(prompts[4])
    logits = generator.forward_tensor(
        input_ids=ids,
        position_ids=torch.arange(len(ids)),
        is_prefill=True,
        kv_cache=generator.pool("test").npu_cache,
        block_tables=torch.arange(5)[None],
        slots=torch.arange(len(ids)),
        input_lengths=torch.tensor([len(ids)]),
        max_seq_len=len(ids),
    )
    assert logits.shape == expected.shape
    error = np.abs(logits.numpy() - expected).max() / np.abs(expected).max()
    assert error < 1e-5
