"""Graphs that torchair wrote, run by the interpreter, against references in float64."""

import copy

import pytest
import torch

from tests.vendor.ascend.graph import compiling, models

HALVES = (torch.float16, torch.bfloat16)
PER_SEQUENCE = range(6)  # of a decoder's inputs


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    compiling.texts()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("window", [-1, 60])
def test_decoding_with_any_batch_by_one_graph(dtype, window):
    """Block borders (127, 128, 129), one token, padding between sequences; written caches and all."""
    model = models.Decoder(2, window=window).to(dtype)
    batches = ([5, 129, 1], [128, 0, 127, 256], [1, 2])
    run = compiling.compiled(model, PER_SEQUENCE, models.inputs(2, batches[0], dtype))
    for lengths in batches:
        inputs = models.inputs(2, lengths, dtype)
        compiling.compiled(model, PER_SEQUENCE, inputs)
        wanted, written = compiling.reference(model, inputs)
        with torch.no_grad():
            found = run(*inputs)
        compiling.close(found, wanted, dtype)
        for cache, other in zip(inputs[6:], written[6:], strict=True):
            compiling.close(cache, other, dtype)
    assert len(compiling.texts()) == 1


def test_weights_are_read_where_they_lie():
    """A weight that is written between two calls is seen, and nothing is compiled again."""
    model = models.Decoder(1).half()
    inputs = models.inputs(1, [5, 9])
    run = compiling.compiled(model, (), inputs)
    with torch.no_grad():
        run(*copy.deepcopy(inputs))
        model.head.mul_(-1)
        found = run(*copy.deepcopy(inputs))
    compiling.close(found, compiling.reference(model, inputs)[0], torch.float16)
    assert len(compiling.texts()) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_experts(dtype):
    model = models.Decoder(1, experts=True).to(dtype)
    run = compiling.compiled(model, PER_SEQUENCE, models.inputs(1, [5, 129, 1], dtype))
    for lengths in ([5, 129, 1], [128, 0, 127, 256]):
        inputs = models.inputs(1, lengths, dtype)
        compiling.compiled(model, PER_SEQUENCE, inputs)
        wanted, _ = compiling.reference(model, inputs)
        with torch.no_grad():
            compiling.close(run(*inputs), wanted, dtype)
    assert len(compiling.texts()) == 1


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("paged", "before", "causal"), [(False, 0, True), (False, 0, False), (True, 0, True), (True, 100, True)]
)
def test_prompts_of_any_length(dtype, paged, before, causal):
    model = models.Prompt(paged, causal).to(dtype)
    for tokens in (5, 128, 130):
        inputs = models.prompt(tokens, before, dtype)
        run = compiling.compiled(model, range(4), inputs)
        wanted, _ = compiling.reference(model, inputs)
        with torch.no_grad():
            compiling.close(run(*inputs), wanted, dtype)
    assert len(compiling.texts()) == 1


@pytest.mark.parametrize("dtype", HALVES)
def test_eight_bits(dtype):
    """A token of zeros too: its numbers are not documented."""
    model = models.EightBit().to(dtype)
    model.scale = model.scale.float()
    x = torch.randn(5, models.HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3] = 0
    run = compiling.compiled(model, [0], [x])
    with torch.no_grad():
        wanted = model(x)  # the same op eagerly: a rounding to 8 bits may differ by one from float64's
        compiling.close(run(x), wanted, dtype)
    assert len(compiling.texts()) == 1
