"""Read the sizes of a language model from the nets of its bmodel, so that generation needs no other file."""

import re
from dataclasses import dataclass

from dlinfer.vendor.sophgo.errors import SophgoLlmError
from dlinfer.vendor.sophgo.sail import Dtype, EngineLLM

EMBEDDING, HEAD = "embedding", "lm_head"

HIDDEN = -10000.0
"""The number in a mask that hides a key, added to the key's score: far below any score, but finite in float16."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a model.

    lengths: the prompt lengths of the prefill nets, ascending.
    capacity: the number of tokens that the KV cache holds.
    heads: the number of KV heads.
    row: the number of elements of one token's keys in one layer; its values have the same number.
    dtype: the dtype of hidden states, masks and KV caches."""

    layers: int
    lengths: tuple[int, ...]
    capacity: int
    hidden: int
    heads: int
    row: int
    vocabulary: int
    dtype: Dtype

    def stage_for(self, tokens: int) -> int:
        """Return the shortest prefill length that holds ``tokens`` tokens; the longest length if none holds them."""
        return next((length for length in self.lengths if length >= tokens), self.lengths[-1])


def read(engine: EngineLLM) -> Layout:
    """Return the sizes of an engine's model. Raises SophgoLlmError if its nets are not those of a language model."""
    names = set(engine.get_graph_names())
    layers = _layers(names)
    embedding = {shape[1] for shape in _shapes(engine, EMBEDDING, 0, 2)}
    blocks = {shape[1] for shape in _shapes(engine, block(0), 0, 3)}
    if not blocks or not blocks | {1} <= embedding:
        detail = (
            f"the embedding takes {sorted(embedding)} tokens, but the layers take {sorted(blocks)}, or 1 with a "
            "cache"
        )
        raise SophgoLlmError(detail=detail)
    past, *_ = _shapes(engine, block_cache(0), 3, 4)
    states, *_ = _shapes(engine, block_cache(0), 0, 3)
    _check_layers(engine, layers, blocks, past)
    return Layout(
        layers=layers,
        lengths=tuple(sorted(blocks)),
        capacity=past[1],
        hidden=states[2],
        heads=past[2],
        row=past[2] * past[3],
        vocabulary=engine.get_output_shape(HEAD, 0)[-1],
        dtype=engine.get_input_dtype(block_cache(0), 0),
    )


def block(index: int) -> str:
    """Return the name of the net that prefills layer ``index``."""
    return f"block_{index}"


def block_cache(index: int) -> str:
    """Return the name of the net that decodes layer ``index``: one new token after the cached tokens."""
    return f"block_cache_{index}"


def _layers(names: set[str]) -> int:
    layers = len({int(name.removeprefix("block_")) for name in names if re.fullmatch(r"block_\d+", name)})
    required = {EMBEDDING, HEAD, *map(block, range(layers)), *map(block_cache, range(layers))}
    missing = sorted(required - names)
    if not layers or missing:
        detail = f"it has no net {', '.join(missing) or block(0)}; its nets are {', '.join(sorted(names))}"
        raise SophgoLlmError(detail=detail)
    return layers


def _shapes(engine: EngineLLM, net: str, index: int, sizes: int) -> list[list[int]]:
    """Return the shape of input ``index`` of a net in each stage.

    Raises SophgoLlmError unless each shape has ``sizes`` sizes and batch size 1."""
    if engine.get_input_num(net) <= index:
        raise SophgoLlmError(detail=f"net {net} has only {engine.get_input_num(net)} inputs")
    shapes = [engine.get_input_shape(net, index, stage) for stage in range(engine.get_stage_num(net))]
    for shape in shapes:
        if len(shape) != sizes or shape[0] != 1:
            raise SophgoLlmError(detail=f"input {index} of net {net} has the unexpected shape {shape}")
    return shapes


def _check_layers(engine: EngineLLM, layers: int, blocks: set[int], past: list[int]) -> None:
    """Raise SophgoLlmError unless all layers have the same sizes and each KV cache has memory of its own.

    blocks: the prompt lengths of layer 0. past: the shape of the KV cache of layer 0."""
    for index in range(layers):
        stages = {shape[1] for shape in _shapes(engine, block(index), 0, 3)}
        cache, *_ = _shapes(engine, block_cache(index), 3, 4)
        if stages != blocks or cache != past or engine.get_input_num(block_cache(index)) != 5:
            raise SophgoLlmError(detail=f"layer {index} has other sizes than layer 0")
    mode = engine.get_addr_mode(block_cache(0))
    if mode != 1:
        raise SophgoLlmError(detail=f"its addr_mode is {mode}, but KV caches need io_alone (1)")
