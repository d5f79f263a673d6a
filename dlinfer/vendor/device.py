"""What a serving framework needs of a device besides kernels and engines: memory, streams, collectives, a graph runner.

A vendor gives one by ``Vendor.load_device``; adaptors ask ``discovery.device(device_type)`` and name no vendor.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from dlinfer.vendor.streams import Streams


class DeviceMemory(NamedTuple):
    """The memory of a device, in bytes.

    available: what this process may still allocate, never negative. total: the bound itself, or all there is.
    source: where the numbers come from, for people.
    shared: whether others than the model live in it, as on a host. A framework then takes little where nothing was
        chosen; of a card's own memory it takes most.
    """

    available: int
    total: int
    source: str
    shared: bool


class Sampler(Protocol):
    """The next token of each row of logits [B, V], as int64 [B]; None where a call has to be served otherwise.

    Nothing is written. Raises FallbackError where the fallback policy refuses what is served otherwise.
    """

    def largest(self, logits: Tensor) -> Tensor | None:
        """The first of the largest logits of each row, as ``argmax(-1)``: NaN is larger than all."""
        ...

    def draw(
        self,
        logits: Tensor,
        numbers: Tensor,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
    ) -> Tensor | None:
        """The first token, of those sorted by probability, up to which there is the share of it that a number says.

        numbers: floating [B], of [0, 1). What may be drawn of a row: top_k, integer [B], so many, where positive; of
        them, top_p, floating [B], those before which there is at most this share; of all, min_p, floating [B], those
        with at least this part of the highest probability. A row whose softmax is NaN gives its first token.
        """
        ...


class HostNumbers(Protocol):
    """Numbers of the host in one captured graph, which keeps those of its capture until it is told others.

    kv_seqlens: the length of each row's sequence in the cache, 0 for a padding row.
    """

    def recording(self, kv_seqlens: Sequence[int]) -> AbstractContextManager[None]:
        """A context, in this thread, in which kernels are captured on the current stream."""
        ...

    def update(self, kv_seqlens: Sequence[int]) -> None:
        """Tell them to the replay that was just put on the current stream, and which waits for it."""
        ...


class Device(ABC):
    """One kind of device, for serving frameworks. One object a vendor, made when a framework first asks.

    streams: its streams and events: a module like ``torch.cuda``, or ``HostStreams()`` where calls return when their
        work is done.
    communicator: the backend of torch.distributed that joins such devices.
    max_batch_size: how many sequences are decoded together where the user says nothing.
    max_prefill_tokens: how many tokens of prompts are computed together, likewise; None leaves it to the framework.
        What decodes beside them waits as long as they take.
    prefill_tokens_beside_decoding: how many tokens a step has, of prompts and of sequences that decode, where it has
        both; None leaves that to the framework too.
    graph_class: the name in ``streams`` of what captures work and replays it, such as "CUDAGraph"; None where the
        vendor's kernels cannot be captured, as they ask the host for numbers that ``host_numbers`` cannot tell.
    padding_length: how many keys a padding row of a captured step has: 0, or 1 where kernels document no length of 0;
        it then reads the first slot of block 0, and writes none.
    tensor_parallel: whether a model may lie on several of them, a process each, joined by ``communicator``.
    """

    streams: Streams
    communicator: str
    max_batch_size: int
    max_prefill_tokens: int | None = None
    prefill_tokens_beside_decoding: int | None = None
    graph_class: str | None = None
    padding_length: int = 0
    tensor_parallel: bool = False

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """What may be allocated now. Asked while an engine starts."""

    def take(self, index: int) -> None:  # noqa: B027 - there is nothing to do where there is one
        """Have this process work on one of several; called before it allocates. Nothing where there is one."""

    def graph_runner(self) -> Callable[..., Any] | None:
        """What runs a model's forward as graphs, where the vendor brings its own: called as LMDeploy's GraphRunner.

        None leaves it to dlinfer's, which compiles for the engine that is chosen or is the vendor's default.
        """
        return None

    def host_numbers(self) -> HostNumbers | None:
        """What tells a graph that is going to be captured the host's numbers of each replay.

        None where a graph's kernels read all of them on the device.
        """
        return None

    def sampler(self) -> Sampler | None:
        """What takes tokens from logits, where the vendor brings it. None leaves it to the framework."""
        return None

    def pack_bf12(self, weight: Tensor) -> Tensor | None:
        """The bytes of a bfloat16 matrix as ``ops.quantised.bf12.pack`` gives them, where the vendor is quicker at it.

        None leaves it to that function.
        """
        return None
