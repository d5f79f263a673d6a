"""Models of dlinfer's ops as LMDeploy calls them when it decodes: heads of 64, pages of 128 slots."""

import torch
from torch import Tensor, nn

HIDDEN, HEADS, KV_HEADS, SIZE, BLOCK = 256, 4, 2, 64, 128
Q, KV = HEADS * SIZE, KV_HEADS * SIZE


def parameter(generator: torch.Generator, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=generator) * shape[-1] ** -0.5)


def gamma(generator: torch.Generator) -> nn.Parameter:
    """Of a norm: around 1, so that what comes behind it is as large as the tolerances say."""
    return nn.Parameter(1 + torch.randn(HIDDEN, generator=generator) * 0.1)


class Attention(nn.Module):
    """Packed q, k and v, their rotation, the cache's write and its attention."""

    def __init__(self, generator: torch.Generator, window: int = -1) -> None:
        super().__init__()
        self.qkv = parameter(generator, Q + 2 * KV, HIDDEN)
        self.bias = parameter(generator, Q + 2 * KV)
        self.out = parameter(generator, HIDDEN, Q)
        self.window = window

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], step: "Step"):
        packed = torch.ops.dlinfer.linear(x, self.qkv, self.bias).view(-1, HEADS + 2 * KV_HEADS, SIZE)
        q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = torch.ops.dlinfer.apply_rotary_pos_emb(q, k, *tables)
        torch.ops.dlinfer.fill_kv_cache(k, v, *caches, step.slots)
        out = torch.empty_like(q)
        self.attend(q, caches, step, out)
        return torch.ops.dlinfer.linear(out.view(-1, Q), self.out, None)

    def attend(self, q: Tensor, caches: tuple[Tensor, Tensor], step: "Step", out: Tensor) -> None:
        torch.ops.dlinfer.paged_decode_attention(
            q,
            *caches,
            step.table,
            BLOCK,
            step.lengths,
            256,
            HEADS,
            KV_HEADS,
            out,
            SIZE**-0.5,
            self.window,
            0.0,
            None,
            None,
        )


class Mlp(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up, self.down = parameter(generator, 512, HIDDEN), parameter(generator, HIDDEN, 256)

    def forward(self, x: Tensor) -> Tensor:
        gated = torch.ops.dlinfer.silu_and_mul(torch.ops.dlinfer.linear(x, self.up, None))
        return torch.ops.dlinfer.linear(gated, self.down, None)


class Experts(nn.Module):
    """Eight experts, of which two are chosen."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.gate = parameter(generator, 8, HIDDEN)
        self.up, self.down = parameter(generator, 8, 512, HIDDEN), parameter(generator, 8, HIDDEN, 256)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.ops.dlinfer.linear(x, self.gate, None)
        weights, ids = torch.ops.dlinfer.moe_gating_topk_softmax(logits, 2, -1)
        return torch.ops.dlinfer.fused_moe(x, self.up, self.down, weights, ids, 2, True)


class Layer(nn.Module):
    """A decoder's block."""

    def __init__(self, generator: torch.Generator, experts: bool = False, window: int = -1) -> None:
        super().__init__()
        self.before, self.between = (gamma(generator) for _ in range(2))
        self.attention = Attention(generator, window)
        self.mlp = Experts(generator) if experts else Mlp(generator)

    def forward(
        self,
        x: Tensor,
        residual: Tensor,
        tables: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        step: "Step",
    ) -> tuple[Tensor, Tensor]:
        x, residual = torch.ops.dlinfer.add_rms_norm(x, residual, self.before, 1e-5)
        x = self.attention(x, tables, caches, step)
        x, residual = torch.ops.dlinfer.add_rms_norm(x, residual, self.between, 1e-5)
        return self.mlp(x), residual


class Step:
    """What a step of decoding knows of its sequences."""

    def __init__(self, slots: Tensor, table: Tensor, lengths: Tensor) -> None:
        self.slots, self.table, self.lengths = slots, table, lengths


class Decoder(nn.Module):
    """Embedded tokens in, logits out."""

    def __init__(self, layers: int, *, experts: bool = False, window: int = -1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.layers = nn.ModuleList(Layer(generator, experts, window) for _ in range(layers))
        self.last = gamma(generator)
        self.head = parameter(generator, 320, HIDDEN)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        table: Tensor,
        lengths: Tensor,
        *caches: Tensor,
    ) -> Tensor:
        step, residual = Step(slots, table, lengths), torch.zeros_like(x)
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
            x, residual = layer(x, residual, (cos, sin), (keys, values), step)
        x, _ = torch.ops.dlinfer.add_rms_norm(x, residual, self.last, 1e-5)
        return torch.ops.dlinfer.linear(x, self.head, None)


def inputs(layers: int, lengths: list[int], dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """Of a ``Decoder``, for sequences of these lengths; one of 0 is padding, whose slot is one that nobody reads.

    Slots of the caches that no sequence has, and the table's entries behind a sequence's end, are nonsense.
    """
    generator = torch.Generator().manual_seed(sum(lengths))
    count, width, blocks = len(lengths), 2, 9
    x = torch.randn(count, HIDDEN, generator=generator)
    angles = torch.rand(count, SIZE // 2, generator=generator).repeat(1, 2) * 6
    table = torch.randperm(blocks - 1, generator=generator)[: count * width].view(count, width).int()
    caches = [torch.randn(blocks, BLOCK, KV_HEADS, SIZE, generator=generator) for _ in range(2 * layers)]
    slots = torch.full((count,), (blocks - 1) * BLOCK)
    for row, length in enumerate(lengths):
        last = max(length - 1, 0)
        if length:
            slots[row] = table[row, last // BLOCK] * BLOCK + last % BLOCK
        else:
            slots[row] += row
        table[row, -(-length // BLOCK) :] = 10**6
        owned = table[row, : -(-length // BLOCK)].long()
        for cache in caches:
            seen = cache[owned].flatten(0, 1)
            seen[length:] = torch.nan
            cache[owned] = seen.view(-1, BLOCK, KV_HEADS, SIZE)
    floats = [one.to(dtype) for one in (x, angles.cos(), angles.sin())]
    return [*floats, slots, table, torch.tensor(lengths), *(cache.to(dtype) for cache in caches)]


class Prompt(nn.Module):
    """A prompt of one sequence over its own keys, or over pages."""

    def __init__(self, paged: bool, causal: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.qkv, self.bias = parameter(generator, Q + 2 * KV, HIDDEN), parameter(generator, Q + 2 * KV)
        self.out = parameter(generator, HIDDEN, Q)
        self.paged, self.causal = paged, causal

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        table: Tensor,
        ends: Tensor,
        lengths: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        packed = torch.ops.dlinfer.linear(x, self.qkv, self.bias).view(-1, HEADS + 2 * KV_HEADS, SIZE)
        q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], 1)
        q, k = torch.ops.dlinfer.apply_rotary_pos_emb(q, k, cos, sin)
        torch.ops.dlinfer.fill_kv_cache(k, v, keys, values, slots)
        out = torch.zeros_like(q)
        heads, rest = (HEADS, KV_HEADS, out, SIZE**-0.5, self.causal), (-1, -1, 0.0, None, None)
        if self.paged:
            torch.ops.dlinfer.paged_prefill_attention(
                q, keys, values, table, BLOCK, ends, lengths, 200, 256, *heads, *rest
            )
        else:
            torch.ops.dlinfer.prefill_attention(q, k, v, ends, lengths, 200, *heads, *rest)
        return torch.ops.dlinfer.linear(out.view(-1, Q), self.out, None)


def prompt(tokens: int, before: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs of a ``Prompt``: ``tokens`` new ones behind ``before`` in the cache."""
    whole = inputs(1, [before + tokens], dtype)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    angles = torch.rand(tokens, SIZE // 2, generator=generator).repeat(1, 2) * 6
    table = whole[4]
    places = torch.arange(before, before + tokens)
    slots = table[0, places // BLOCK].long() * BLOCK + places % BLOCK
    ends, lengths = torch.tensor([tokens]), torch.tensor([before + tokens])
    floats = [one.to(dtype) for one in (x, angles.cos(), angles.sin())]
    return [*floats, slots, table, ends, lengths, *whole[6:]]


class EightBit(nn.Module):
    """A norm whose result is quantised, and a product of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.norm = gamma(generator)
        self.register_buffer(
            "weight", torch.randint(-128, 128, (96, HIDDEN), generator=generator).to(torch.int8)
        )
        self.register_buffer("scale", torch.rand(96, 1, generator=generator) * 2e-3)

    def forward(self, x: Tensor) -> Tensor:
        numbers, scale = torch.ops.dlinfer.rms_norm_w8a8(x, self.norm, 1e-5, torch.int8)
        first = self.product(numbers, scale, x.dtype)
        numbers, scale = torch.ops.dlinfer.dynamic_quant(x, torch.int8)
        return first + self.product(numbers, scale, x.dtype)

    def product(self, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.ops.dlinfer.linear_w8a8(numbers, self.weight, scale, self.scale, dtype, torch.int8, None)
