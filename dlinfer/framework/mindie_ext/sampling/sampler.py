"""The sampler, which selects a token for each sequence."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlinfer.framework.mindie_ext.errors import SamplingError
from dlinfer.framework.mindie_ext.sampling.metadata import SamplingMetadata
from dlinfer.framework.mindie_ext.sampling.output import NO_LOGPROB, SamplingOutput
from dlinfer.framework.mindie_ext.sampling.scores import candidates, penalised


class Sampler:
    """Selects a token for each sequence, greedily or by a random draw. num_threads: threads for the draws.

    A draw depends only on the sequence: its logits, its parameters, its seed, and how often it drew before. It does not
    depend on the batch, the order of the batch or the threads.
    """

    def __init__(self, num_threads: int = 8) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="dlinfer-sampling")
        self._num_threads = num_threads
        self._drawn: dict[int, tuple[int, int]] = {}  # sequence id -> (seed, number of draws so far)
        self._lock = threading.Lock()
        self.device: torch.device | None = None
        self.eos_token_id: list[int] = []

    def initialize(self, device: torch.device, eos_token_id: Iterable[int]) -> None:
        """Set the device of the logits, and the tokens that end a text."""
        self.device, self.eos_token_id = device, list(eos_token_id)

    def configure(self, metadata: SamplingMetadata) -> None:
        """Reset the random generator of each sequence in ``metadata`` to its seed."""
        with self._lock:
            for sequence_id in metadata.all_sequence_ids.tolist():
                self._drawn.pop(sequence_id, None)

    def clear_cache(self, sequence_ids: Iterable[int]) -> None:
        """Forget how often these sequences drew. Unknown ids are ignored."""
        with self._lock:
            for sequence_id in sequence_ids:
                self._drawn.pop(int(sequence_id), None)

    def __call__(self, logits: Tensor, metadata: SamplingMetadata | None = None) -> SamplingOutput:
        """Sample a token for each row of logits. The logits are not mutated.

        logits: [sequences, vocabulary], floating. metadata: None means greedy sampling.

        The steps are: repetition, frequency and presence penalty, temperature, top_k, top_p, draw. A greedy sequence
        takes the most likely token after the penalties; of equally likely tokens, the one with the lowest id.
        Log-probabilities are computed after the penalties and, for a sequence with do_sample, also after the
        temperature.

        Raises SamplingError for logits of another shape, NaN, or a row without a possible token.
        """
        rows = 0 if metadata is None else len(metadata.all_sequence_ids)
        if (
            logits.dim() != 2
            or not logits.is_floating_point()
            or not logits.shape[1]
            or rows not in (0, len(logits))
        ):
            expected = f"[{rows or 'sequences'}, vocabulary] of a floating dtype"
            actual = f"{logits.dtype} {tuple(logits.shape)}"
            raise SamplingError(parameter="logits", expected=expected, given=actual)
        wide = logits.detach().cpu()
        wide = wide.float() if metadata is None else penalised(wide, metadata)
        self._check(wide, metadata)
        token_ids = wide.argmax(-1) if len(wide) else torch.zeros(0, dtype=torch.int64)
        seeds = None
        if metadata is not None and metadata.do_sample_array is not None and metadata.do_sample_array.any():
            wide = self._tempered(wide, metadata)
            seeds = metadata.seed_array
            self._draw(wide, metadata, token_ids)
        return _output(wide, token_ids, metadata, seeds)

    def _tempered(self, wide: Tensor, metadata: SamplingMetadata) -> Tensor:
        if metadata.temperature is None:
            return wide
        assert metadata.do_sample_array is not None
        scale = np.where(metadata.do_sample_array, metadata.temperature, 1.0).astype(np.float32)
        return wide / torch.from_numpy(scale)[:, None]

    def _draw(self, wide: Tensor, metadata: SamplingMetadata, token_ids: Tensor) -> None:
        """For each sequence with do_sample, draw a token and write it into token_ids."""
        assert metadata.do_sample_array is not None
        drawn = np.flatnonzero(metadata.do_sample_array).tolist()
        places = [self._uniform(metadata, row) for row in drawn]
        pieces = min(self._num_threads, len(drawn))

        def some(piece: int) -> None:
            for index in range(piece, len(drawn), pieces):
                token_ids[drawn[index]] = _draw_row(wide[drawn[index]], metadata, drawn[index], places[index])

        list(self._threads.map(some, range(pieces)))
        self._count(metadata, drawn)

    def _uniform(self, metadata: SamplingMetadata, row: int) -> float:
        """Return the random number in [0, 1) for the next draw of a sequence.

        Seed and number of earlier draws determine it.
        """
        assert metadata.seed_array is not None
        seed = int(metadata.seed_array[row])
        with self._lock:
            known = self._drawn.get(int(metadata.all_sequence_ids[row]))
        count = known[1] if known is not None and known[0] == seed else 0
        return float(np.random.Generator(np.random.Philox(key=seed, counter=count)).random())

    def _count(self, metadata: SamplingMetadata, drawn: list[int]) -> None:
        assert metadata.seed_array is not None
        with self._lock:
            for row in drawn:
                sequence_id, seed = int(metadata.all_sequence_ids[row]), int(metadata.seed_array[row])
                known = self._drawn.get(sequence_id)
                count = known[1] if known is not None and known[0] == seed else 0
                self._drawn[sequence_id] = (seed, count + 1)

    def _check(self, wide: Tensor, metadata: SamplingMetadata | None) -> None:
        highest = wide.amax(-1)
        wrong = torch.isnan(highest) | (highest == -torch.inf)
        if metadata is not None and metadata.do_sample_array is not None:
            wrong |= (highest == torch.inf) & torch.from_numpy(metadata.do_sample_array)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            whose: Any = row if metadata is None else int(metadata.all_sequence_ids[row])
            expected = "numbers, at least one above -inf (and no inf if a token is drawn)"
            raise SamplingError(
                parameter=f"logits of sequence {whose}", expected=expected, given=float(highest[row])
            )


def _draw_row(row: Tensor, metadata: SamplingMetadata, index: int, place: float) -> int:
    """Return a token: the one that a random number selects from the tokens that top_k and top_p keep.

    row: [vocabulary], the logits of the sequence ``index``. place: the random number in [0, 1).
    """
    top_k = 0 if metadata.top_k_array is None else int(metadata.top_k_array[index])
    top_p = 1.0 if metadata.top_p_array is None else float(metadata.top_p_array[index])
    left, ids = candidates(row, top_k, top_p)
    sums = left.double().softmax(0).cumsum(0)
    chosen = int(torch.searchsorted(sums, place * sums[-1], right=True))
    return int(ids[min(chosen, len(ids) - 1)])


def _output(
    wide: Tensor, token_ids: Tensor, metadata: SamplingMetadata | None, seeds: np.ndarray | None
) -> SamplingOutput:
    count = len(wide)
    most = 0 if metadata is None else min(metadata.max_logprobs, wide.shape[1])
    logprobs = np.full(count, NO_LOGPROB, dtype=np.float32)
    top_token_ids = np.zeros((count, 0), dtype=np.int64)
    top_logprobs = np.zeros((count, 0), dtype=np.float32)
    if most:
        every = wide.log_softmax(-1)
        logprobs = every.gather(1, token_ids[:, None])[:, 0].numpy()
        values, ids = every.topk(most, dim=-1)
        top_token_ids, top_logprobs = ids.numpy(), values.numpy()
    ids = None if metadata is None else metadata.all_sequence_ids
    return SamplingOutput(
        sequence_ids=ids,
        parent_sequence_ids=ids,
        group_indices=[(row, row + 1) for row in range(count)],
        repeating_indices=np.arange(count),
        token_ids=token_ids.numpy(),
        logprobs=logprobs,
        top_token_ids=top_token_ids,
        top_logprobs=top_logprobs,
        cumulative_logprobs=np.zeros(count, dtype=np.float32),
        num_new_tokens=np.ones(count, dtype=np.int64),
        num_top_tokens=None if metadata is None else metadata.num_top_tokens,
        seeds=seeds,
    )
