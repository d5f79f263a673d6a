"""Steps of torch's attention and of dlinfer's own ops, with KV caches that hold NaN where nothing was written."""

from tests.fuzz.generate import Draft
from tests.fuzz.program import Step


def attention(g: Draft) -> Step:
    """Scaled dot-product attention, half of the time on heads that were moved by a transpose."""
    batch, heads, queries, keys, size = (
        g.choose(1, 2),
        g.choose(1, 2, 4),
        g.choose(1, "A", 4, 4, 8),
        g.choose(4, 8, 8, "B"),
        g.choose(4, 8, 16),
    )
    moved = g.chance(0.6)
    if g.chance(0.5):
        keys = queries
    shapes = [
        (batch, length, heads, size) if moved else (batch, heads, length, size)
        for length in (queries, keys, keys)
    ]
    dtype = g.choose("float32", "float32", "bfloat16")
    one, two, three = (
        g.new_input(shape, dtype, role="argument", content=g.choose("normal", "normal", "same"))
        for shape in shapes
    )
    move = ".transpose(1, 2)" if moved else ""
    extra = g.choose("", "", ", is_causal=True", ", scale=0.3", ", attn_mask={3}")
    uses = (one, two, three)
    if "{3}" in extra:
        uses = (*uses, g.new_input((queries, keys), g.choose("bool", dtype), role="argument"))
    call = f"F.scaled_dot_product_attention({{0}}{move}, {{1}}{move}, {{2}}{move}{extra})"
    after = g.choose(
        "",
        ".mul(2).sin()",
        ".transpose(1, 2)",
        ".transpose(1, 2).flatten(2)",
        ".transpose(1, 2).reshape(-1).sin()",
    )
    return Step(g.name(), call + after, uses, rounds=True, features=("attention",))


def fused_norm(g: Draft) -> Step:
    """dlinfer's norms."""
    name = g.floats(1)
    value = g.values[name]
    kind = str(value.dtype).removeprefix("torch.")
    weight = g.new_input((value.shape[-1],), kind, content="normal")
    if g.chance(0.4):
        residual = g.new_input(value.shape, kind)
        text = f"dlinfer.ops.add_rms_norm({{0}}, {{1}}, {{2}}, 1e-6)[{g.choose(0, 1)}]"
        return Step(g.name(), text, (name, residual, weight), rounds=True, features=("dlinfer op",))
    return Step(
        g.name(),
        "dlinfer.ops.rms_norm({0}, {1}, 1e-5)",
        (name, weight),
        rounds=True,
        features=("dlinfer op",),
    )


def gated(g: Draft) -> Step:
    """dlinfer's gated activations and linear layer."""
    way = g.choose("silu_and_mul", "silu_mul", "gelu_mul", "linear")
    if way == "linear":
        name = g.new_input(("A", 8), content="normal")
        weight = g.new_input((4, 8), role="weight", content="normal")
        return Step(
            g.name(), "dlinfer.ops.linear({0}, {1})", (name, weight), rounds=True, features=("dlinfer op",)
        )
    if way == "silu_and_mul":
        return Step(
            g.name(),
            "dlinfer.ops.silu_and_mul({0})",
            (g.new_input((1, "A", 8)),),
            rounds=True,
            features=("dlinfer op",),
        )
    one = g.floats(1)
    other = g.new_input(g.values[one].shape, str(g.values[one].dtype).removeprefix("torch."))
    return Step(
        g.name(), f"dlinfer.ops.{way}({{0}}, {{1}})", (one, other), rounds=True, features=("dlinfer op",)
    )


def rotary(g: Draft) -> Step:
    """dlinfer's rotary embedding, on the parts of one projection."""
    packed = g.new_input(("A", 4, 8), content="normal")
    cos, sin = (
        g.new_input(("A", 8), content="normal", alias=()),
        g.new_input(("A", 8), content="normal", alias=()),
    )
    text = f"dlinfer.ops.apply_rotary_pos_emb({{0}}[:, :3], {{0}}[:, 3:], {{1}}, {{2}})[{g.choose(0, 1)}]"
    return Step(g.name(), text, (packed, cos, sin), rounds=True, features=("dlinfer op",))


def cache(g: Draft) -> Step:
    """New tokens into a paged KV cache, and attention over it. Blocks and heads are equal in number, so that a cache
    fits the layout of every vendor."""
    dtype = g.choose("float32", "float32", "bfloat16")
    heads, size, blocks = 32, 4, 2
    tokens = g.choose(1, 2)
    keys, values = (
        g.new_input((tokens, heads, size), dtype, content="normal", role="argument", alias=()) for _ in "kv"
    )
    role = g.choose("buffer", "argument")
    content = g.choose("unused", "normal")
    caches = [
        g.new_input((blocks, 32, heads, size), dtype, content=content, role=role, layout="plain", alias=())
        for _ in "kv"
    ]
    slots = g.new_input(
        (tokens,), "int64", content="slots", bound=tokens, role="argument", layout="plain", alias=()
    )
    features = ("dlinfer op", "cache", "write")
    if g.chance(0.6):
        text = g.choose(
            "dlinfer.ops.fill_kv_cache({2}, {3}, {0}, {1}, {4})",
            "{0}.view(-1, 32, 4)[{4}] = {2}; {1}.view(-1, 32, 4)[{4}] = {3}",
        )
        return Step("", text, (*caches, keys, values, slots), features=features)
    table = g.new_input(
        (1, blocks), "int64", content="index", bound=1, role="argument", layout="plain", alias=()
    )
    queries = g.new_input((1, heads, size), dtype, content="normal", role="argument", alias=())
    written = "dlinfer.ops.fill_kv_cache({2}, {3}, {0}, {1}, {4})"
    ends, lengths = "torch.tensor([1], dtype=torch.int32)", f"torch.tensor([{tokens}], dtype=torch.int32)"
    attended = (
        f"dlinfer.ops.paged_decode_attention({{6}}, *{written}, {{5}}, 32, {ends}, {lengths}, {tokens}, "
        f"{heads}, {heads}, softmax_scale=0.5)"
    )
    return Step(
        g.name(), attended, (*caches, keys, values, slots, table, queries), rounds=True, features=features
    )


def experts(g: Draft) -> Step:
    """A mixture of experts, whose ids may lie outside."""
    x = g.new_input(("A", 8), "float32", content="normal")
    up, down = (
        g.new_input((4, 16, 8), "float32", role="weight", content="normal"),
        g.new_input((4, 8, 8), "float32", role="weight", content="normal"),
    )
    weights = g.new_input(("A", 2), "float32", content="normal", role="argument")
    ids = g.new_input(
        ("A", 2), "int64", content=g.choose("index", "index", "beyond"), bound=4, role="argument"
    )
    text = "dlinfer.ops.fused_moe({0}, {1}, {2}, {3}, {4}, 2, False)"
    return Step(g.name(), text, (x, up, down, weights, ids), rounds=True, features=("dlinfer op",))


def masked_attention_by_hand(g: Draft) -> Step:
    """Attention written in torch over memory of which a part was never written."""
    q = g.new_input((2, "A", 4), "float32", content="normal")
    old = g.new_input(
        (2, 8, 4), "float32", content=g.choose("normal", "unused"), role=g.choose("buffer", "argument")
    )
    text = g.choose(
        "torch.softmax(({0} @ {1}.mT).masked_fill(torch.arange(8) >= 3, float('-inf')), -1) @ {1}",
        "torch.softmax(({0} @ {1}.mT)[..., :3], -1) @ {1}[:, :3]",
        "torch.where(torch.arange(8)[:, None] < 3, {1}, 0.0).sum(1)",
    )
    return Step(g.name(), text, (q, old), rounds=True)


def growing_cache(g: Draft) -> Step:
    """Every row written into a cache that held nothing, and attention over it."""
    length = g.choose(2, 4)
    cache = g.new_input(
        (1, 2, length, 4),
        "float32",
        content=g.choose("unused", "normal"),
        role=g.choose("buffer", "argument"),
        alias=(),
    )
    rows = g.new_input((1, 2, length, 4), "float32", content="normal", role="argument", alias=())
    queries = g.new_input((1, 2, 3, 4), "float32", content="normal", role="argument", alias=())
    index = g.new_input(
        (length,), "int64", content="slots", bound=length, role="argument", layout="plain", alias=()
    )
    kept = "{0}.index_copy_(2, {3}, {1})"
    keys = g.choose("torch.zeros_like({0}).index_copy_(2, {3}, {1})", "{4}.index_copy_(2, {3}, {1})")
    values = g.choose(kept, "torch.empty_like({0}).fill_(float('nan')).index_copy_(2, {3}, {1})")
    mask = f", attn_mask=(torch.arange({length}) < {length})[None]" if g.chance(0.5) else ""
    writes = values == kept or "{4}" in keys
    features = ("attention", "write") if writes else ("attention",)
    uses = (cache, rows, queries, index)
    if "{4}" in keys:
        uses = (*uses, g.new_input((1, 2, length, 4), "float32", content="unused", role="argument", alias=()))
    text = f"F.scaled_dot_product_attention({{2}}, {keys}, {values}{mask})"
    return Step(g.name(), text, uses, rounds=not writes, features=features)


DRAWN = {
    attention: 4,
    fused_norm: 2,
    gated: 1.5,
    rotary: 1,
    cache: 3,
    experts: 1.2,
    masked_attention_by_hand: 0.7,
    growing_cache: 2,
}
