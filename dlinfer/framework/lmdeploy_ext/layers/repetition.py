"""Ends a text that repeats itself by its own stop word, and leaves texts that have none as they are.

A request that is checked for repeated n-grams may share a batch with one that has no stop words (``ignore_eos``), whose
row LMDeploy fills with -1. Taken as the index of a logit that is an error of the step, which ends every request.

This file loads before LMDeploy's modules do, since it patches them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.patching import Patch


def _filter_repetition_ngram(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def filter_repetition_ngram(
        scores: Tensor, stop_words: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """scores [B, V]. stop_words [B, S], int64, -1 where a row has fewer. As LMDeploy's, it may write scores."""
        if stop_words is None or stop_words.numel() == 0:
            return original(scores, stop_words, *args, **kwargs)
        is_without = stop_words[:, :1] < 0
        kept = scores.clone()
        filtered = original(scores, stop_words.clamp(min=0), *args, **kwargs)
        return torch.where(is_without, kept, filtered)

    return filter_repetition_ngram


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.engine.logits_process:_filter_repetition_ngram_",
        why="takes -1, which stands where a row has no stop word, for the index of a logit",
        signature="(scores, stop_words, generated_ids, n, threshold, max_n, max_ngram_window_size)",
        build=_filter_repetition_ngram,
        essential=False,
    ),
)
