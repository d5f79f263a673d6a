"""KV caches with the statistics of trained models: kernels against float64, and the loss of each ``quant_policy``.

The loss is the norm of the error of attention's result, divided by the norm of the result of unrounded keys and values.
"""

import functools

import pytest
import torch
from torch import Tensor

from dlinfer import ops, vendor
from tests import trained_statistics as trained
from tests.ops import dense_oracle
from tests.ops.test_quantised_kv_cache import POLICIES, new_caches, read
from tests.vendor.cpu.test_native import DTYPES, FLOAT32_UNIT

TOKENS, HEADS, SIZE, BLOCK = 256, 2, 64, 16
KEYS = {"plain keys": 1.0, "outlier channels": trained.OUTLIER}
SCALE = SIZE**-0.5


@pytest.fixture(autouse=True)
def _cpu():
    vendor.use("cpu")


@functools.cache
def attended(keys: str, dtype: torch.dtype = torch.float32) -> trained.Attended:
    return trained.Attended(
        *(part.to(dtype) for part in trained.attended(0, TOKENS, HEADS, SIZE, KEYS[keys]))
    )


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    arrays = (part.double().numpy() for part in (q, k, v))
    return torch.from_numpy(dense_oracle.attention(*arrays, scale=SCALE, causal=True))


class Run:
    """Attention over a cache that holds ``attended``.

    prompt: the result of a prompt of all tokens. decoded: of a step with the last token.
    k, v: the keys and values that are read, float64.
    """

    def __init__(self, of: trained.Attended, policy: int) -> None:
        blocks, q, k, v = TOKENS // BLOCK, *of
        shape, slots = (blocks, BLOCK, HEADS), torch.arange(TOKENS)
        if policy:
            caches = new_caches(shape, (SIZE, SIZE), policy, q.dtype)
            for scale in caches[2:] if policy > 8 else ():
                scale.fill_(1.0)  # as LMDeploy
        else:
            caches = [torch.zeros(*shape, SIZE, dtype=q.dtype) for _ in range(2)]
        ops.fill_kv_cache(k, v, *caches[:2], slots, *caches[2:], quant_bits=policy)
        scales = dict(zip(("k_scales_zeros", "v_scales_zeros"), caches[2:], strict=False))
        scales |= {"quant_bits": policy} if policy else {}
        pages = (*caches[:2], torch.arange(blocks)[None], BLOCK)
        lengths = torch.tensor([TOKENS])
        self.prompt = ops.paged_prefill_attention(
            q, k, v, *pages, lengths, lengths, TOKENS, TOKENS, HEADS, HEADS, [], **scales
        )
        self.decoded = ops.paged_decode_attention(
            q[-1:], *pages, torch.tensor([1]), lengths, TOKENS, HEADS, HEADS, **scales
        )
        if policy:
            held = [
                torch.from_numpy(read(*pair, policy)) for pair in zip(caches[:2], caches[2:], strict=True)
            ]
        else:
            held = [cache.double() for cache in caches]
        self.k, self.v = (part.flatten(0, 1) for part in held)


def test_the_first_token_takes_most_of_the_attention():
    for keys in KEYS:
        q, k, _ = attended(keys)
        logits = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        shares = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -torch.inf).softmax(-1)
        assert shares[..., 0].mean() > 0.8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", [0, *POLICIES])
@pytest.mark.parametrize("keys", KEYS)
def test_kernels_attend_to_what_the_cache_holds(keys, policy, dtype):
    """A logit errs by as many float32 units of the sum of its products' magnitudes as there are products, and so many
    times the values does the result, once for the numerator and once for the denominator of the softmax."""
    of = attended(keys, dtype)
    run = Run(of, policy)
    k, v = (part.to(dtype).double() for part in (run.k, run.v))  # rounded once while they are read
    want = attention(of.q, k, v)
    magnitudes = torch.einsum("qhd,khd->hqk", of.q.double().abs(), k.abs()).max() * SCALE
    tolerance = ops.registry()["paged_prefill_attention"].tolerances[dtype]
    atol = tolerance.atol + float(2 * (SIZE + 4) * FLOAT32_UNIT * magnitudes * v.abs().max())
    for out, expected in ((run.prompt, want), (run.decoded, want[-1:])):
        torch.testing.assert_close(out.double(), expected, rtol=tolerance.rtol, atol=atol)


@pytest.mark.parametrize(
    ("policy", "plain", "outliers"),
    [
        # One scale for all channels of a key: its step is the largest channel's, and there are 255 or 15 of them.
        (8, 0.0071, 0.0133),
        (4, 0.12, 0.30),
        # Each number has three or two bits after its first, and a large number's error meets a query's large numbers.
        (16, 0.030, 0.057),
        (17, 0.111, 0.136),
    ],
)
def test_the_loss(policy, plain, outliers):
    for keys, lost in (("plain keys", plain), ("outlier channels", outliers)):
        of = attended(keys)
        want, out = attention(*of), Run(of, policy).prompt.double()
        assert float((out - want).norm() / want.norm()) == pytest.approx(lost, rel=0.15), keys


def test_fp8_cuts_keys_beyond_448():
    """Biases of keys reach hundreds in some models. 17 has the range, 16 has not; 8 and 4 scale."""
    _, k, _ = attended("plain keys")
    large = 40 * attended("outlier channels").k
    assert large.max() > 448
    for policy in POLICIES:
        held = Run(trained.Attended(k, large, k), policy).k
        assert (held.max() < 449) == (policy == 16)
