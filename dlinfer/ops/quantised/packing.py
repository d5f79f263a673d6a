"""Layouts of weights of a few bits packed into integers, such as AWQ's and GPTQ's. One class reads them all.

The weight is w[i, o] = (q[i, o] - zero[g, o]) * scale[g, o] with q and zero of ``bits`` bits and g = i // group_size.
AWQ (Lin et al., 2023, arXiv:2306.00978) is packed as AutoAWQ and LMDeploy store it. GPTQ (Frantar et al., 2022,
arXiv:2210.17323) is packed as AutoGPTQ stores it. In MXFP4 (OCP Microscaling Formats specification 1.0) q stands for a
float of four bits.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dlinfer.errors import OpArgumentError

_ROWS = 128
"""How many rows of words are repacked at a time: some megabytes, which fit in a CPU cache."""


class Quantised(NamedTuple):
    """A weight as a checkpoint stores it: qweight, scales [groups, out], and packed zeros (None if symmetric)."""

    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None


@dataclass(frozen=True)
class Packing:
    """One packed layout of a weight [in_features, out_features].

    bits: the size of one number in bits. A word of dtype ``storage`` holds ``per_word`` numbers.
    along: the features whose neighbours share a word, "in" or "out". Words of zero points hold neighbours of "out".
    order: bits i * bits to (i + 1) * bits - 1 of a word hold the neighbour with the index order[i].
    group_size: how many in_features share a scale and a zero point; 0 for all of them. The last group may be shorter.
    symmetric: no zero points are stored; every zero point is the middle, 2 ** (bits - 1).
    zero_bias: the number to add to a stored zero point; 1 in GPTQ's first format.
    storage: the integer dtype of a word.
    numbers: the value of each q if q stands for a float; such layouts have no zero points.
    """

    bits: int
    along: Literal["in", "out"]
    order: tuple[int, ...]
    group_size: int = 0
    symmetric: bool = False
    zero_bias: int = 0
    storage: torch.dtype = torch.int32
    numbers: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(self.per_word)):
            expected = f"each of 0..{self.per_word - 1} once"
            raise OpArgumentError(op="packing", argument="order", expected=expected, given=self.order)

    @property
    def per_word(self) -> int:
        """The number of numbers in a word."""
        return self.storage.itemsize * 8 // self.bits

    @property
    def middle(self) -> int:
        """The zero point of a symmetric weight."""
        return 2 ** (self.bits - 1)

    def groups(self, in_features: int) -> int:
        """Return how many groups ``in_features`` input features form."""
        size = self.group_size or max(in_features, 1)
        return (in_features + size - 1) // size

    # --- whole numbers

    def pack(self, numbers: Tensor) -> Tensor:
        """Pack numbers [in_features, out_features] of any integer dtype: return a new tensor of words.

        The dimension ``along`` becomes smaller by the factor ``per_word``. Raises OpArgumentError if its size is no
        multiple of ``per_word``.
        """
        return self._pack(numbers, dim=0 if self.along == "in" else 1)

    def unpack(self, words: Tensor) -> Tensor:
        """Unpack words: return their numbers [in_features, out_features], int32. This is the inverse of ``pack``."""
        return self._unpack(words, dim=0 if self.along == "in" else 1)

    def repack(self, words: Tensor, target: "Packing") -> Tensor:
        """Return the numbers of ``words`` packed in the layout ``target``: a new tensor of ``target.storage``.

        words: see ``pack``, any strides.

        To save memory, only a few rows at a time are unpacked. From "in" to "out", the numbers usually move without
        unpacking.

        Raises OpArgumentError if ``target.bits`` differs from ``bits``, or if the size of the dimension
        ``target.along`` is no multiple of ``target.per_word``.
        """
        if self.bits != target.bits:
            expected = f"a layout of {self.bits} bits"
            raise OpArgumentError(op="packing", argument="target", expected=expected, given=target.bits)
        turns = (self.along, target.along) == ("in", "out") and self.storage is target.storage
        if turns and words.shape[1] % self.per_word == 0:
            turned = words.new_empty(words.shape[0], self.per_word, words.shape[1] // self.per_word)
            for part, out in zip(torch.split(words, _ROWS), torch.split(turned, _ROWS), strict=True):
                self._turn(part, target, out)
            return turned.flatten(0, 1)
        step = _ROWS if self.along == "in" else _ROWS * self.per_word
        return torch.cat([target.pack(self.unpack(part)) for part in torch.split(words, step)])

    def _turn(self, words: Tensor, target: "Packing", out: Tensor) -> None:
        """Repack words along "in" as words along "out", and write them to ``out``.

        words: [rows, columns]. Each word holds ``per_word`` numbers of one out_feature (a column).
        out: [rows, per_word, columns / per_word]. Each word holds ``per_word`` numbers of one in_feature.

        The numbers in ``per_word`` neighbouring words of a row form a square matrix. To transpose it, swap its two
        off-diagonal quarters, then those of each quarter, and so on (Warren, Hacker's Delight, 7-3).
        """
        neighbours = torch.unflatten(words, 1, (-1, self.per_word))
        square = [neighbours[:, :, which].clone() for which in target.order]
        half = self.per_word // 2
        while half:
            shift = half * self.bits
            lower = sum((2**shift - 1) << place for place in range(0, self.storage.itemsize * 8, 2 * shift))
            for i in range(self.per_word):
                if not i & half:
                    swapped = ((square[i] >> shift) ^ square[i + half]) & lower
                    square[i + half] ^= swapped
                    square[i] ^= swapped << shift
            half //= 2
        for place, which in enumerate(self.order):
            out[:, which] = square[place]

    def pack_zeros(self, zeros: Tensor) -> Tensor:
        """Pack zero points [groups, out_features] of any integer dtype: return words. Raises OpArgumentError."""
        return self._pack(zeros - self.zero_bias, dim=1)

    def unpack_zeros(self, words: Tensor) -> Tensor:
        """Return the zero points [groups, out_features], int32, in ``words``."""
        return self._unpack(words, dim=1) + self.zero_bias

    def _pack(self, numbers: Tensor, dim: int) -> Tensor:
        size = numbers.shape[dim]
        if size % self.per_word:
            expected = f"a multiple of {self.per_word} in dimension {dim}"
            raise OpArgumentError(op="packing", argument="numbers", expected=expected, given=size)
        neighbours = torch.unflatten(numbers.long(), dim, (size // self.per_word, self.per_word))
        words = torch.zeros_like(neighbours.select(dim + 1, 0))
        for place, which in enumerate(self.order):
            words |= (neighbours.select(dim + 1, which) & (2**self.bits - 1)) << (place * self.bits)
        return words.to(self.storage)

    def _unpack(self, words: Tensor, dim: int) -> Tensor:
        mask = 2**self.bits - 1
        places = [self.order.index(which) * self.bits for which in range(self.per_word)]
        parts = [(words >> place) & mask for place in places]
        return torch.stack(parts, dim=dim + 1).flatten(dim, dim + 1).to(torch.int32)

    # --- weights

    def dequantise(
        self,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor | None,
        dtype: torch.dtype | None = None,
        group_of: Tensor | None = None,
    ) -> Tensor:
        """Return the weight [in_features, out_features], in ``dtype`` or, if None, in the scales' dtype.

        qweight: words, see ``pack``.
        scales: [groups, out_features], floating.
        qzeros: words, see ``pack_zeros``, or None for the middle.
        group_of: [in_features], the group of each in_feature, if groups are not in order (GPTQ's g_idx).

        This method defines the meaning of a packed weight. It is slow and allocates the full size.
        """
        numbers, scales = self.unpack(qweight), scales.to(dtype or scales.dtype)
        if group_of is None:
            size = self.group_size or max(numbers.shape[0], 1)
            group_of = torch.arange(numbers.shape[0], device=qweight.device) // size
        if self.numbers is not None:
            values = torch.tensor(self.numbers, dtype=scales.dtype, device=qweight.device)
            return values[numbers] * scales[group_of]
        zeros = self.middle if qzeros is None else self.unpack_zeros(qzeros)[group_of]
        return (numbers - zeros).to(scales.dtype) * scales[group_of]

    def quantise(self, weight: Tensor, dtype: torch.dtype = torch.float16) -> Quantised:
        """Quantise a weight to this layout, rounding each number to nearest: for tests and tools.

        weight: [in_features, out_features], floating; ``weight.t()`` of a torch.nn.Linear.
        dtype: of the scales.

        The range of each group covers its least and greatest number, and zero. Raises OpArgumentError for a layout of
        floats.
        """
        if self.numbers is not None:
            raise OpArgumentError(op="packing", argument="numbers", expected="None", given=self.numbers)
        wide, levels = weight.double(), 2**self.bits - 1
        kind = torch.finfo(dtype)
        least = kind.smallest_normal * kind.eps  # the smallest subnormal number: a scale is never 0
        size = self.group_size or max(weight.shape[0], 1)
        scales, zeros, numbers = list[Tensor](), list[Tensor](), list[Tensor]()
        for group in torch.split(wide, size):
            if self.symmetric:
                scale = group.abs().amax(0) / (self.middle - 1)
            else:
                scale = (group.amax(0).clamp(min=0) - group.amin(0).clamp(max=0)) / levels
            scale = scale.clamp(min=least).to(dtype).double()
            middle = torch.full_like(scale, self.middle)
            zero = (
                middle if self.symmetric else (-group.amin(0).clamp(max=0) / scale).round().clamp(0, levels)
            )
            if self.zero_bias:  # stored minus zero_bias, in as many bits
                zero = zero.clamp(min=self.zero_bias)
            scales.append(scale)
            zeros.append(zero)
            numbers.append((group / scale + zero).round().clamp(0, levels))
        qzeros = None if self.symmetric else self.pack_zeros(torch.stack(zeros).long())
        return Quantised(self.pack(torch.cat(numbers).long()), torch.stack(scales).to(dtype), qzeros)

    def of_groups(self, group_size: int) -> "Packing":
        """Return this layout with another group_size."""
        return replace(self, group_size=group_size)


AWQ = Packing(bits=4, along="out", order=(0, 2, 4, 6, 1, 3, 5, 7))
"""qweight [in_features, out_features / 8], scales [groups, out_features], qzeros [groups, out_features / 8]."""

GPTQ = Packing(bits=4, along="in", order=(0, 1, 2, 3, 4, 5, 6, 7), zero_bias=1)
"""qweight [in_features / 8, out_features], scales [groups, out_features], qzeros [groups, out_features / 8].
A stored zero point is one less than its meaning; in GPTQ's second format, ``replace(GPTQ, zero_bias=0)``, it is not."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = Packing(
    bits=4,
    along="out",
    order=AWQ.order,
    group_size=32,
    symmetric=True,
    numbers=(*_E2M1, *(-number for number in _E2M1)),
)
"""qweight [in_features, out_features / 8] as in AWQ, and scales [groups, out_features], which are powers of two."""
