"""Greedy generation with a language model's bmodel, through ``sail.EngineLLM``.

Hidden states and KV caches stay on the device. A layer's KV cache is the memory that its ``block_cache`` net has for
the inputs past_k and past_v. Prefill, and then each decode step, copies the keys and values of its tokens there.
"""

import operator
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlinfer.vendor.sophgo import sail
from dlinfer.vendor.sophgo.errors import SophgoLlmError
from dlinfer.vendor.sophgo.llm import layout
from dlinfer.vendor.sophgo.llm.layout import EMBEDDING, HEAD, HIDDEN, Layout, block, block_cache
from dlinfer.vendor.sophgo.sail.arrays import decoded, encoded

Tensors = dict[int, sail.Tensor]


@dataclass
class Generated:
    """The answer to a prompt.

    tokens: the new tokens, including the end token.
    prefilled: the number of the prompt's tokens that a prefill net computed. All other tokens took a decode step each.
    logits: float32 [new tokens, vocabulary]; None if the caller did not ask to keep them.
    """

    tokens: list[int]
    prefilled: int
    logits: np.ndarray | None = field(default=None, repr=False)


def generate(
    source: str | os.PathLike[str] | bytes,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    dev_ids: Sequence[int] = (0,),
    flags: int | None = None,
    keep_logits: bool = False,
) -> Generated:
    """Load a bmodel from a path or from bytes, and continue one prompt. Raises the errors of ``Generator``."""
    generator = Generator(open_engine(source, dev_ids, flags))
    return generator.generate(prompt, max_new_tokens, eos_token_ids=eos_token_ids, keep_logits=keep_logits)


def open_engine(
    source: str | os.PathLike[str] | bytes, dev_ids: Sequence[int] = (0,), flags: int | None = None
) -> sail.EngineLLM:
    """Open a bmodel from a path or from bytes on these devices. flags: BMRuntime's; only for a path."""
    if isinstance(source, bytes):
        if flags is not None:
            raise SophgoLlmError(detail="sail.EngineLLM takes flags with a path, not with bytes")
        return sail.EngineLLM(source, len(source), list(dev_ids))
    if flags is not None:
        return sail.EngineLLM(os.fspath(source), flags, list(dev_ids))
    return sail.EngineLLM(os.fspath(source), list(dev_ids))


class Generator:
    """Continues prompts with the nets of a language model. It takes one prompt at a time, from one thread.

    Raises SophgoLlmError for a bmodel that ``dlinfer compile --engine sophgo`` did not write.
    """

    def __init__(self, engine: sail.EngineLLM) -> None:
        self.engine = engine
        self.layout: Layout = layout.read(engine)
        self._caches = [self._cache(block_cache(index)) for index in range(self.layout.layers)]
        # Allocates all memory, on the engine's device.
        handle, lengths = sail.Handle(engine.get_device_ids()[0]), self.layout.lengths
        self._buffers = {length: _Buffers(handle, self.layout, length, length) for length in lengths}
        self._step = _Buffers(handle, self.layout, 1, self.layout.capacity + 1)
        shape = (1, 1, self.layout.hidden)
        self._head_input = sail.Tensor(handle, shape, self.layout.dtype, False, True)
        shape, dtype = engine.get_output_shape(HEAD, 0), engine.get_output_dtype(HEAD, 0)
        self._logits = sail.Tensor(handle, shape, dtype, False, True)

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        eos_token_ids: Collection[int] = (),
        keep_logits: bool = False,
    ) -> Generated:
        """Return the answer to a prompt: the most probable token at each step, until one of ``eos_token_ids``.

        The shortest prefill stage that holds the prompt computes it. If no stage holds the prompt, the longest stage
        computes its first tokens, and each further token takes a decode step.
        Raises SophgoLlmError for a wrong token, and if prompt and answer exceed the KV cache.
        Raises SophgoRuntimeError and SophgoWorkerError if the device fails.
        """
        prompt = self._checked(prompt, max_new_tokens)
        prefilled = min(len(prompt), self.layout.lengths[-1])
        logits = self._prefill(prompt[:prefilled])
        for position in range(prefilled, len(prompt)):
            logits = self._decode(prompt[position], position)
        tokens = [int(logits.argmax())]
        kept = [logits]
        while len(tokens) < max_new_tokens and tokens[-1] not in eos_token_ids:
            logits = self._decode(tokens[-1], len(prompt) + len(tokens) - 1)
            tokens.append(int(logits.argmax()))
            if keep_logits:
                kept.append(logits)
        return Generated(tokens, prefilled, np.stack(kept) if keep_logits else None)

    def _checked(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        sizes = self.layout
        detail = f"a prompt must have one or more tokens from 0 to {sizes.vocabulary - 1}"
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError as cause:
            raise SophgoLlmError(detail=f"{detail}, not {prompt!r}") from cause
        if not tokens or not all(0 <= token < sizes.vocabulary for token in tokens):
            raise SophgoLlmError(detail=detail)
        most = sizes.capacity + 1 - len(tokens)
        if type(max_new_tokens) is not int or not 1 <= max_new_tokens <= most:
            request = f"the call asks for {len(tokens)} tokens of prompt and {max_new_tokens} new ones"
            limits = f"the model holds {sizes.capacity} besides the last new one, and returns at least 1"
            raise SophgoLlmError(detail=f"{request}; {limits}")
        return tokens

    def _prefill(self, prompt: Sequence[int]) -> np.ndarray:
        """Compute a prompt by a prefill net. Return the logits after its last token."""
        count, length = len(prompt), self.layout.stage_for(len(prompt))
        ids = np.zeros(length, np.int32)
        ids[:count] = prompt
        mask = np.triu(np.full((length, length), HIDDEN, np.float32), k=1)
        return self._forward(self._buffers[length], ids, np.arange(length, dtype=np.int32), mask, 0, count)

    def _decode(self, token: int, position: int) -> np.ndarray:
        """Compute ``token`` at ``position`` by a decode step. Return the logits after it.

        The KV caches must contain all tokens before ``position``.
        """
        mask = np.full(self.layout.capacity + 1, HIDDEN, np.float32)
        mask[:position] = 0
        mask[-1] = 0
        ids, positions = (np.array([number], np.int32) for number in (token, position))
        return self._forward(self._step, ids, positions, mask, position, 1)

    def _forward(
        self,
        buffers: "_Buffers",
        ids: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray,
        start: int,
        count: int,
    ) -> np.ndarray:
        """Compute ``count`` tokens and write their keys and values to the KV caches from ``start`` on.

        Return the logits after the last of these tokens.
        """
        row = self.layout.row
        buffers.ids.update_data(ids)
        buffers.positions.update_data(positions)
        buffers.mask.update_data(encoded(mask, self.layout.dtype))
        self._run(EMBEDDING, {0: buffers.ids}, {0: buffers.states})
        states, spare = buffers.states, buffers.spare
        for index, caches in enumerate(self._caches):
            net, inputs = block(index), {0: states, 1: buffers.positions, 2: buffers.mask}
            if buffers is self._step:
                net, inputs = block_cache(index), {**inputs, 3: caches[0], 4: caches[1]}
            self._run(net, inputs, {0: spare, 1: buffers.keys, 2: buffers.values})
            for cache, new in zip(caches, (buffers.keys, buffers.values), strict=True):
                cache.sync_d2d(new, 0, start * row, count * row)
            states, spare = spare, states
        return self._head(states, count - 1)

    def _head(self, states: sail.Tensor, row: int) -> np.ndarray:
        hidden = self.layout.hidden
        self._head_input.sync_d2d(states, row * hidden, 0, hidden)
        self._run(HEAD, {0: self._head_input}, {0: self._logits})
        return decoded(self._logits.asnumpy(), self._logits.dtype()).reshape(-1)

    def _run(self, net: str, inputs: Tensors, outputs: Tensors) -> None:
        if self.engine.process(net, inputs, outputs):
            error = self.engine.last_error
            assert error is not None, "a process that fails sets last_error"
            raise error

    def _cache(self, net: str) -> list[sail.Tensor]:
        """Return the KV cache of a layer, keys and values, set to zero.

        It is the memory of the inputs of ``block_cache``.
        net: the name of the layer's ``block_cache`` net.
        """
        tensors = self.engine.get_input_tensors(net)
        assert tensors, "the layout requires io_alone"
        for index in (3, 4):
            tensors[index].zeros()  # hidden rows are multiplied by 0, so they must not be NaN
        return [tensors[3], tensors[4]]


class _Buffers:
    """Device memory for the inputs and outputs of nets that compute ``length`` tokens at once.

    keys: the number of keys that each token can see.
    """

    def __init__(self, handle: sail.Handle, sizes: Layout, length: int, keys: int) -> None:
        def tensor(*shape: int, dtype: sail.Dtype = sizes.dtype) -> sail.Tensor:
            return sail.Tensor(handle, (1, *shape), dtype, False, True)

        self.ids, self.positions = (tensor(length, dtype=sail.Dtype.BM_INT32) for _ in range(2))
        self.states, self.spare = (tensor(length, sizes.hidden) for _ in range(2))
        self.mask = tensor(1, length, keys)
        row = (sizes.heads, sizes.row // sizes.heads)
        self.keys, self.values = (tensor(length, *row) for _ in range(2))
