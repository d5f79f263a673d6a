"""Kernels of the cpu vendor: vectorised torch, without a Python loop over sequences or experts in decode."""

from dlinfer.vendor.base import Kernel

KERNELS: dict[str, Kernel] = {}
