"""Devices for serving frameworks, beyond kernels and engines: memory, streams, collectives, a graph runner.

A vendor provides a ``Device`` through ``Vendor.load_device``; adaptors call ``discovery.device(device_type)``.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dlinfer.vendor.streams import Streams

if TYPE_CHECKING:  # dlinfer serve imports this module, and needs no torch
    from torch import Tensor


class DeviceMemory(NamedTuple):
    """The memory of a device, in bytes.

    available: bytes that this process may still allocate, never negative.
    total: the limit of this process, or all memory of the device if the process has no limit.
    source: the origin of the numbers, for people.
    shared: whether other programs use the memory too, as on a host. By default a framework takes a small part of shared
        memory, but most of a card's own memory.
    """

    available: int
    total: int
    source: str
    shared: bool


class Sampler(Protocol):
    """Selects the next token of each row of logits [B, V], as int64 [B].

    A method returns None to let the framework sample instead, or raises FallbackError if the fallback policy forbids
    that. No argument is mutated.
    """

    def largest(self, logits: "Tensor") -> "Tensor | None":
        """Return the index of each row's largest logit, the first of several. NaN is largest, as in ``argmax(-1)``."""
        ...

    def draw(
        self,
        logits: "Tensor",
        numbers: "Tensor",
        top_k: "Tensor | None" = None,
        top_p: "Tensor | None" = None,
        min_p: "Tensor | None" = None,
    ) -> "Tensor | None":
        """Draw one token of each row by inverting the cumulative distribution of its tokens, most probable first.

        numbers: floating [B], random numbers in [0, 1). The first token whose cumulative probability exceeds a row's
            number is drawn.
        top_k: integer [B]; if positive, only the first ``top_k`` tokens may be drawn.
        top_p: floating [B]; a token may be drawn only if the tokens before it add up to at most this probability.
        min_p: floating [B]; a token may be drawn only if it has at least this fraction of the highest probability.
        If a row's softmax is NaN, its first token is drawn.
        """
        ...


class HostNumbers(Protocol):
    """Numbers in host memory that the kernels of one captured graph need.

    A replay uses the numbers of the capture until ``update`` replaces them. Both methods take kv_seqlens, the length of
    each row's sequence in the cache, 0 for a padding row.
    """

    def recording(self, kv_seqlens: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context for the capture of the graph. In it, kernels of this thread record their host numbers."""
        ...

    def update(self, kv_seqlens: Sequence[int]) -> None:
        """Send new numbers to the replay that was put on the current stream last. The replay waits for them."""
        ...


class Device(ABC):
    """One kind of device, for serving frameworks. A vendor creates one object when a framework first asks.

    streams: a module with streams and events like ``torch.cuda``, or ``HostStreams()`` if the device works
        synchronously.
    communicator: the torch.distributed backend that joins devices of this kind.
    max_batch_size: the default number of sequences decoded together.
    max_prefill_tokens: the default number of prompt tokens computed together, while decoding sequences wait. None: the
        framework decides.
    seconds_beside_decoding: how long a step that mixes decoding and prefill may take. It limits the prompt tokens of
        the step. None: the framework decides.
    seconds_of_prompts: how long a step that only prefills may take, besides the limit by ``max_prefill_tokens``. None:
        only that limit holds.
    graph_class: the name of the graph class in ``streams``, such as "CUDAGraph". None if the vendor's kernels cannot be
        captured because they need host numbers that ``host_numbers`` cannot provide.
    padding_length: the number of keys of a padding row in a captured step: 0, or 1 if the kernels document no length of
        0. With 1, the row reads the first slot of block 0 and writes nothing.
    tensor_parallel: whether a model may span several devices, one process each, joined by ``communicator``.
    graphs_over_ranks: whether the graphs of a model that spans several devices may contain ``ops.all_reduce``. If
        False, that op runs eagerly.
    """

    streams: Streams
    communicator: str
    max_batch_size: int
    max_prefill_tokens: int | None = None
    seconds_beside_decoding: float | None = None
    seconds_of_prompts: float | None = None
    graph_class: str | None = None
    padding_length: int = 0
    tensor_parallel: bool = False
    graphs_over_ranks: bool = False

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Return free and total memory. Called while an engine starts and before each capture."""

    def description(self) -> str:
        """Return a text for the log: the part of the device that this process has, such as cores and threads.

        The text is empty if this is unknown.
        """
        return ""

    def take(self, index: int) -> None:  # noqa: B027 - there is nothing to do where there is one
        """Make device ``index`` the current one of this process, before the process allocates memory.

        The default does nothing: it is for a vendor with one device.
        """

    def share(self, index: int, count: int) -> None:  # noqa: B027 - a card is not shared
        """Confine this process, one of ``count`` ranks of a model on the same device, to its part of the device.

        Called in each rank, once all have started and before they load weights. index: 0 to count - 1.
        """

    def connect(self, group: int) -> str:
        """Prepare ``ops.all_reduce`` for a group of ranks. Called on all ranks at once, after ``share``.

        group: a group number of ``dlinfer.ops.collective.groups``. Returns a text that says how the ranks sum. A
        compiled graph is reused only for the text that it was compiled with.
        """
        return "torch.distributed"

    def disconnect(self, group: int) -> None:  # noqa: B027
        """Free what ``connect`` prepared."""

    def graph_runner(self) -> Callable[..., Any] | None:
        """Return the vendor's own graph runner for a model's forward, called like LMDeploy's GraphRunner.

        None: dlinfer's own graph runner is used. It compiles for the engine that the user chose, or else for the
        vendor's default engine.
        """
        return None

    def host_numbers(self) -> HostNumbers | None:
        """Return the ``HostNumbers`` for a graph that is about to be captured; None if its kernels need none."""
        return None

    def sampler(self) -> Sampler | None:
        """Return the vendor's sampler. None: the framework samples."""
        return None

    def pack_bf12(self, weight: "Tensor") -> "Tensor | None":
        """Pack a bfloat16 matrix like ``ops.quantised.bf12.pack``, but faster. None: the caller uses that function."""
        return None

    def is_faster_with_bf12(self, most_rows: int) -> bool:
        """Return whether ``linear_bf12`` is faster than ``linear`` in bfloat16, for 1 to ``most_rows`` rows of x."""
        return False


def host_identity() -> str:
    """Return a text that is equal in all processes that see the same host, and in no others."""
    boot = ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"
