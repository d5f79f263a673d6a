"""Which tokens a draw may give, worked out in float64 over a sorted row."""

from typing import NamedTuple

from torch import Tensor


class Limits(NamedTuple):
    """What may be drawn of a row, as LMDeploy's requests say it."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def may_be_drawn(row: Tensor, number: float, limits: Limits, rounding: float) -> Tensor:
    """The tokens that a draw by ``number`` may give where sums err by ``rounding`` of the whole; mostly one.

    row [V], finite but for -inf. Of equal logits the lower token is first. A token is drawn where the share of the
    weight up to it is the first to reach the number.
    """
    ordered, tokens = row.double().sort(descending=True, stable=True)
    weights = (ordered - ordered[0]).exp()
    through = weights.cumsum(0)
    leaves = len(row) if limits.top_k <= 0 else min(limits.top_k, len(row))

    def kept(sign: int) -> int:
        """How many may be drawn, at the least (-1) or at the most (1)."""
        share = (limits.top_p + sign * rounding) * through[leaves - 1]
        by_share = 1 + int((through[:leaves] <= share).sum()) if limits.top_p < 1 else leaves
        by_part = int((weights >= limits.min_p * (1 - sign * rounding)).sum()) if limits.min_p > 0 else leaves
        return max(1, min(leaves, by_share, by_part))

    def place(sign: int) -> int:
        count = kept(sign)
        share = (number + sign * rounding) * through[count - 1]
        return min(count - 1, int((through[:count] < share).sum()))

    return tokens[place(-1) : place(1) + 1]
