"""Fill a batch sample by sample. Each sample is copied once, into the tensor that a session reads."""

import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dlinfer.errors import BatchCollectorError
from dlinfer.runtime.session.arrays import Array, array_of, tensor_of


class BatchCollector:
    """A batch as one tensor, which is filled sample by sample. Several threads may collect at once.

    If ``tensor`` is a session's own input (``session.get_input_tensor``), the next run reads the collected samples.
    MegEngine Lite's class for the same purpose is TensorBatchCollector.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.int8,
        device: str | torch.device = "cpu",
        *,
        pin_memory: bool = False,
        tensor: torch.Tensor | None = None,
    ) -> None:
        """Allocate the batch, or take ``tensor`` as its memory.

        shape: [batch, ...]. tensor: a contiguous tensor of this shape to fill. Its dtype and device replace the
        arguments ``dtype`` and ``device``. Raises BatchCollectorError.
        """
        self._shape, self._dtype = tuple(shape), dtype if tensor is None else tensor.dtype
        if not shape or not all(type(size) is int and size >= 0 for size in shape):
            raise self._refused(
                "a shape has at least one size, and its sizes are whole numbers of at least 0"
            )
        if tensor is None:
            tensor = torch.zeros(self._shape, dtype=dtype, device=device, pin_memory=pin_memory)
        elif tuple(tensor.shape) != self._shape or not tensor.is_contiguous():
            gaps = "" if tensor.is_contiguous() else " with gaps"
            raise self._refused(f"the tensor to fill has shape {tuple(tensor.shape)}{gaps}")
        self._tensor = tensor
        self._free = set(range(self._shape[0]))
        self._lock = threading.Lock()

    def _refused(self, detail: str) -> BatchCollectorError:
        return BatchCollectorError(shape=self._shape, dtype=self._dtype, detail=detail)

    @property
    def free_ids(self) -> list[int]:
        """Return the ids of the free places, lowest first."""
        with self._lock:
            return sorted(self._free)

    def collect(self, array: object) -> int:
        """Copy a sample into the first free place and return the place's id.

        array: a numpy array or torch tensor. Its shape is the batch's shape without the first dimension. Raises
        BatchCollectorError if no place is free, or if the sample has another shape or dtype than the batch.
        """
        sample = self._sample(array)
        batch_id = self._take()
        self._tensor[batch_id].copy_(sample)
        return batch_id

    def collect_id(self, array: object, batch_id: int) -> None:
        """Copy a sample into the place ``batch_id``, even if the place is already filled."""
        self._checked(batch_id)
        sample = self._sample(array)
        with self._lock:
            self._free.discard(batch_id)
        self._tensor[batch_id].copy_(sample)

    def collect_by_ctypes(self, data: Any, length: int) -> int:
        """Copy one sample from a ``ctypes.c_void_p`` into the first free place and return the place's id.

        length: the sample's size in bytes. The caller guarantees that ``data`` points to that many readable bytes.
        """
        address = ctypes.cast(data, ctypes.c_void_p).value
        expected = self._tensor[0].nbytes if len(self._tensor) else 0
        if length != expected or (not address and length):
            raise self._refused(
                f"{length} bytes at address {address} were passed, but a sample has {expected} bytes"
            )
        batch_id = self._take()
        if length:
            memory = (ctypes.c_byte * length).from_address(address or 0)
            sample = torch.frombuffer(memory, dtype=self._tensor.dtype)
            self._tensor[batch_id].view(-1).copy_(sample)
        return batch_id

    def free(self, indexes: Iterable[int]) -> None:
        """Mark the places with these ids as free. Their contents stay until a new sample is copied there."""
        batch_ids = [self._checked(index) for index in indexes]
        with self._lock:
            self._free.update(batch_ids)

    def get(self) -> torch.Tensor:
        """Return the whole batch, not copied."""
        return self._tensor

    def to_numpy(self) -> Array:
        """Return a copy of the whole batch. Raises BatchCollectorError for a dtype that numpy lacks."""
        try:
            return self._tensor.detach().cpu().numpy().copy()
        except TypeError as cause:
            raise self._refused(f"numpy has no dtype {self._tensor.dtype}: use get()") from cause

    def _checked(self, batch_id: int) -> int:
        if type(batch_id) is not int or not 0 <= batch_id < len(self._tensor):
            raise self._refused(f"it has no sample {batch_id!r}")
        return batch_id

    def _take(self) -> int:
        with self._lock:
            if not self._free:
                raise self._refused("all samples are taken: free() one first")
            batch_id = min(self._free)
            self._free.discard(batch_id)
            return batch_id

    def _sample(self, value: object) -> torch.Tensor:
        """Return ``value`` as a tensor without a copy.

        Raises BatchCollectorError if a place does not take its shape or dtype.
        """
        array = array_of(value)
        try:
            sample = value if array is None else tensor_of(array)
        except (TypeError, ValueError) as cause:
            raise self._refused(
                f"a sample has numpy's dtype {getattr(value, 'dtype', None)}, which torch does not have"
            ) from cause
        if not isinstance(sample, torch.Tensor):
            kind = type(value).__name__
            raise self._refused(f"a sample must be a numpy array or a torch tensor, but a {kind} was passed")
        if sample.shape != self._tensor.shape[1:] or sample.dtype != self._tensor.dtype:
            raise self._refused(f"the sample is {sample.dtype} {tuple(sample.shape)}")
        return sample
