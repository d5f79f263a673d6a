"""How the model matrix calls each kind of model: which sizes, which phases, which results are compared.

Sizes change in an order that lets Dynamo meet both changes early: (2, 5) fixes everything, (3, 8) makes batch and
length symbols, what follows reuses that graph but where a size is 1, which Dynamo always compiles apart.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import EncoderDecoderCache, StaticCache

from tests.graph.matrix.models import CACHE_LENGTH, VOCAB, Architecture

BATCHES = (2, 3, 1)
LENGTHS = (5, 8, 17, 1)
DECODE_STEPS = 4

Size = tuple[int, int]
Forward = Callable[..., Any]
"""Called with the phase's name and the model's keyword arguments."""

Results = Iterator[tuple[str, torch.Tensor]]


def sizes() -> list[Size]:
    """Every batch size with every length, both changing from one to the next."""
    walk = [
        (BATCHES[i % len(BATCHES)], LENGTHS[i % len(LENGTHS)]) for i in range(len(BATCHES) * len(LENGTHS))
    ]
    assert len(set(walk)) == len(walk)
    return walk


def _ids(generator: torch.Generator, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def _padding_mask(batch: int, length: int) -> torch.Tensor:
    """Ones, but the last sequence ends one token early where it has one to lose."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    if length > 1:
        mask[-1, -1] = 0
    return mask


def generator(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """Prefill, then greedy decode steps over a static cache. States of state-space models are such a cache too."""
    batch, length = size
    names = inspect.signature(type(model).forward).parameters
    cache_name = "cache_params" if "cache_params" in names else "past_key_values"
    cache = StaticCache(model.config, max_cache_len=CACHE_LENGTH)
    ids = _ids(rng, batch, length)
    for step in range(1 + DECODE_STEPS):
        phase = "decode" if step else "prefill"
        logits = forward(
            phase, input_ids=ids, use_cache=True, **{cache_name: cache}, **architecture.call
        ).logits
        yield f"{phase} {step}", logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        yield f"token {step}", ids


def encoder(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    ids = _ids(rng, *size)
    yield (
        "logits",
        forward("encode", input_ids=ids, attention_mask=_padding_mask(*size), **architecture.call).logits,
    )


def encoder_decoder(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """A source of two tokens more than the decoder's prompt; later steps reuse the encoder's result and caches."""
    batch, length = size
    source = length + 2
    yield from _translate(
        model,
        forward,
        rng,
        size,
        {"input_ids": _ids(rng, batch, source), "attention_mask": _padding_mask(batch, source)},
        keep=("attention_mask",),
        source_positions=source,
    )


def whisper(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """Audio always fills Whisper's window of fixed length; the prompt's length varies."""
    positions = model.config.max_source_positions
    features = torch.randn(size[0], model.config.num_mel_bins, 2 * positions, generator=rng)
    yield from _translate(
        model, forward, rng, size, {"input_features": features}, keep=(), source_positions=positions
    )


def _translate(
    model: Any,
    forward: Forward,
    rng: torch.Generator,
    size: Size,
    source: dict[str, torch.Tensor],
    keep: tuple[str, ...],
    source_positions: int,
) -> Results:
    decoder = model.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(
        StaticCache(decoder, max_cache_len=CACHE_LENGTH), StaticCache(decoder, max_cache_len=source_positions)
    )
    ids = _ids(rng, *size)
    inputs: dict[str, Any] = source
    for step in range(1 + DECODE_STEPS):
        phase = "decode" if step else "prefill"
        out = forward(phase, decoder_input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
        if not step:
            yield "encoder", out.encoder_last_hidden_state
            inputs = {name: source[name] for name in keep}
            inputs["encoder_outputs"] = (out.encoder_last_hidden_state,)
        yield f"{phase} {step}", out.logits
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        yield f"token {step}", ids


def vision(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """The four lengths are the heights of the images: 32, 40, 64 and 48 pixels, all 32 wide."""
    batch, length = size
    height = (32, 40, 64, 48)[LENGTHS.index(length)]
    pixels = torch.randn(batch, 3, height, 32, generator=rng)
    yield from _tensors(forward("encode", pixel_values=pixels, **architecture.call))


def fixed_image(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """Images of the configured size in every batch size."""
    pixels = torch.randn(size[0], 3, model.config.image_size, model.config.image_size, generator=rng)
    yield from _tensors(forward("encode", pixel_values=pixels, **architecture.call))


def image_text(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """As many images as texts, of varying length."""
    ids = _ids(rng, *size)
    pixels = torch.randn(size[0], 3, 32, 32, generator=rng)
    out = forward("encode", input_ids=ids, attention_mask=_padding_mask(*size), pixel_values=pixels)
    yield "logits_per_image", out.logits_per_image


def waveform(
    architecture: Architecture, model: Any, forward: Forward, size: Size, rng: torch.Generator
) -> Results:
    """A length of n is 200 + 40 n samples: between 9 and 41 frames."""
    batch, length = size
    samples = torch.randn(batch, 200 + 40 * length, generator=rng)
    yield from _tensors(forward("encode", input_values=samples, **architecture.call))


def _tensors(output: Mapping[str, Any]) -> Results:
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            yield name, value


PLANS: dict[str, Callable[..., Results]] = {
    "generator": generator,
    "encoder": encoder,
    "encoder-decoder": encoder_decoder,
    "whisper": whisper,
    "vision": vision,
    "fixed-image": fixed_image,
    "image-text": image_text,
    "waveform": waveform,
}
