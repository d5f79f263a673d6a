"""Computes the memory that an engine takes from sizes that are known before weights load."""

from dataclasses import dataclass

FLOAT32 = 4
KEPT = 2
"""Buffers of this many layers are resident: the allocator keeps those of the layer before, which have other sizes."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide about the buffers of a forward.

    hidden: width. widest: elements that one token has in the buffers of a layer. vocabulary: logits of one row.
    itemsize: bytes of one number.
    """

    hidden: int
    widest: int
    vocabulary: int
    itemsize: int


def widest(hidden: int, attention: int, intermediate: int, experts: int) -> int:
    """Elements that one token has in the buffers of a layer.

    The residual and the normed input; the joint projection of q, k and v, and the rotated ones. For each of a token's
    experts: the joint projection of gate and up, their product, and its result, which is summed at the end.
    attention: width of the joint projection of q, k and v.
    """
    mlp = 3 * intermediate * max(experts, 1) + hidden * experts
    return 2 * hidden + 2 * attention + mlp


def prefill_bytes(shape: Shape, tokens: int) -> int:
    """Buffers of one prefill of so many tokens."""
    return KEPT * tokens * shape.widest * shape.itemsize


def logits_bytes(shape: Shape, rows: int) -> int:
    """Logits of so many rows, and sampling's float32 logits, sorted logits, indices (8 bytes) and probabilities."""
    return rows * shape.vocabulary * (shape.itemsize + 3 * FLOAT32 + 8)


@dataclass(frozen=True)
class Plan:
    """Bytes that an engine takes on top of each other.

    process: Python, torch, LMDeploy and its threads, with no model. graphs: compiling. weights: in the dtype that is
    loaded, tied ones once. mapped: the largest weight file, whose pages count as the process's while it is copied.
    kv_cache: allocated as a whole and zeroed at the start. activations: of the largest prefill. logits: of a full
    batch.
    """

    process: int
    graphs: int
    weights: int
    mapped: int
    kv_cache: int
    activations: int
    logits: int

    @property
    def while_loading(self) -> int:
        """The peak while weights load."""
        return self.process + self.weights + self.mapped

    @property
    def while_serving(self) -> int:
        """The peak while requests run."""
        return self.process + self.graphs + self.weights + self.kv_cache + self.activations + self.logits

    @property
    def peak(self) -> int:
        """The most resident memory at any time."""
        return max(self.while_loading, self.while_serving)

    @property
    def needed(self) -> int:
        """Bytes that must be free. Mapped pages of files can be dropped, so they do not count."""
        return self.while_serving
