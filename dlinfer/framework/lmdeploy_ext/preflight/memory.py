"""Computes the memory that an engine takes from sizes that are known before weights load."""

from dataclasses import dataclass, field

RUNNING = 60 << 20
"""Bytes of a running engine beyond its imports: threads, tokenizer. Measured: docs/results/memory.md."""

GRAPHS = 70 << 20
"""Bytes that compiling graphs takes, the compiler included; none in eager mode."""

FLOAT32 = 4
KEPT = 2
"""Buffers of this many layers are resident: the allocator keeps those of the layer before, which have other sizes."""


def widest(hidden: int, attention: int, intermediate: int, experts: int) -> int:
    """Elements that one token has in the buffers of a layer.

    The residual and the normed input; the joint projection of q, k and v, and the rotated ones. For each of a token's
    experts: the joint projection of gate and up, their product, and its result, which is summed at the end.
    attention: width of the joint projection of q, k and v.
    """
    mlp = 3 * intermediate * max(experts, 1) + hidden * experts
    return 2 * hidden + 2 * attention + mlp


def prefill_bytes(tokens: int, widest: int, itemsize: int) -> int:
    """Buffers of one prefill of so many tokens. widest: see the function of that name."""
    return KEPT * tokens * widest * itemsize


def logits_bytes(rows: int, vocabulary: int, itemsize: int) -> int:
    """Logits of so many rows, and sampling's float32 logits, sorted logits, indices (8 bytes) and probabilities."""
    return rows * vocabulary * (itemsize + 3 * FLOAT32 + 8)


@dataclass
class Memory:
    """The memory that an engine would take, in bytes, and the sizes behind it.

    process: Python, torch, LMDeploy and its threads, with no model.
    graphs: compiling.
    weights: in the dtype that is loaded, tied ones once.
    mapped: the largest weight file. Its pages count as the process's while it is copied.
    kv_cache: allocated as a whole and zeroed at the start.
    activations: of the largest prefill.
    logits: of a full batch.
    peak: the most resident memory at any time, while weights load or while requests run.
    needed: bytes that must be free, beyond this process. Mapped pages of files can be dropped, so they do not count.
    free: bytes that are free.
    source: the origin of that number.
    stored: bytes of the weights in their files.
    kv_token: bytes of one token over all layers.
    kv_blocks: blocks of the cache.
    block_size: tokens of a block.
    prefill_tokens: tokens of one prefill.
    """

    process: int
    graphs: int
    weights: int
    mapped: int
    kv_cache: int
    activations: int
    logits: int
    peak: int = field(init=False)
    needed: int = field(init=False)
    free: int
    source: str
    stored: int
    kv_token: int
    kv_blocks: int
    block_size: int
    prefill_tokens: int

    def __post_init__(self) -> None:
        buffers = self.graphs + self.kv_cache + self.activations + self.logits
        self.needed = RUNNING + self.weights + buffers
        self.peak = self.process + self.weights + max(self.mapped, buffers)
