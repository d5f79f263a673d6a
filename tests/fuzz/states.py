"""Global state of torch that a caller may have changed between two calls. A finding's script holds this code whole."""

import contextlib
from collections.abc import Iterator

import torch

STATES = (
    "autocast bfloat16",
    "autocast float16",
    "default float64",
    "default bfloat16",
    "inference",
    "grad",
    "deterministic",
    "one thread",
)


@contextlib.contextmanager
def entered(state: str) -> Iterator[None]:
    """Run a call under one of ``STATES``; the empty name changes nothing."""
    kind, _, name = state.partition(" ")
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        if kind == "autocast":
            with torch.autocast("cpu", dtype=getattr(torch, name)):
                yield
        elif kind == "inference":
            with torch.inference_mode():
                yield
        elif kind == "grad":
            with torch.enable_grad():
                yield
        else:
            if kind == "default":
                torch.set_default_dtype(getattr(torch, name))
            if kind == "deterministic":
                torch.use_deterministic_algorithms(True, warn_only=True)
            if kind == "one":
                torch.set_num_threads(1)
            yield
    finally:
        torch.set_default_dtype(default)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)
