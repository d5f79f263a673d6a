"""Computes the memory that an engine will take, from sizes that are known before weights load."""

from dataclasses import dataclass, field

RUNNING = 60 << 20
"""Bytes that a running engine takes besides its imports, for threads and the tokenizer (docs/results/memory.md)."""

GRAPHS = 70 << 20
"""Bytes that the graphs and their compiler take; none in eager mode."""

FLOAT32 = 4
KEPT = 2
"""Layers with resident buffers: the current one, and the previous one, whose buffers have other sizes."""


def widest(hidden: int, attention: int, intermediate: int, experts: int) -> int:
    """Return the number of elements that one token takes in the buffers of a layer.

    All layers have buffers for the residual, for the normed input, and for the joint projection of q, k and v before
    and after rotation. Each expert that the token goes to has buffers for the joint projection of gate and up, for the
    product of gate and up, and for the expert's result. A dense layer has the buffers of one expert, except its result.

    hidden, intermediate: hidden_size and intermediate_size of config.json. attention: width of the joint projection of
    q, k and v. experts: the number of experts that a token goes to; 0 for a dense layer.
    """
    mlp = 3 * intermediate * max(experts, 1) + hidden * experts
    return 2 * hidden + 2 * attention + mlp


def prefill_bytes(tokens: int, widest: int, itemsize: int) -> int:
    """Return the size in bytes of the buffers of a prefill of ``tokens`` tokens.

    widest: the result of the function ``widest``. itemsize: bytes of an element.
    """
    return KEPT * tokens * widest * itemsize


def logits_bytes(rows: int, vocabulary: int, itemsize: int) -> int:
    """Return the size in bytes of the logits and of sampling's buffers, for ``rows`` sequences.

    Sampling has float32 logits, sorted logits and probabilities, and indices of 8 bytes. itemsize: bytes of a logit.
    """
    return rows * vocabulary * (itemsize + 3 * FLOAT32 + 8)


@dataclass
class Memory:
    """The memory that an engine would take, in bytes, and the sizes that it depends on.

    process: bytes of Python, torch, LMDeploy and its threads, without a model.
    graphs: bytes of compiled graphs and the compiler; 0 in eager mode.
    weights: bytes of the weights in the dtype that is loaded. Tied weights count once.
    mapped: bytes of weight files that are resident at most while weights load: the largest file, or the largest tensor
        if a tensor's pages are released after it.
    kv_cache: bytes of the KV cache, which is allocated as a whole and zeroed at the start.
    activations: bytes of the buffers of the largest prefill.
    logits: bytes of the logits of a full batch, with sampling's buffers.
    peak: the most resident bytes at any time, while weights load or while requests run.
    needed: bytes that must be free, in addition to the memory that this process already has. Mapped pages do not count,
        because the system can drop them.
    free: bytes that are free.
    source: a text that says where ``free`` was read.
    stored: bytes of the weights in their files.
    kv_token: bytes of one token's keys and values over all layers.
    kv_blocks: the number of blocks in the KV cache.
    block_size: tokens in a block.
    prefill_tokens: the most tokens in one prefill.
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
