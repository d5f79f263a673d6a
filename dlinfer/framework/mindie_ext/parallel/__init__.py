"""Tensor parallelism: several processes join as ranks, and each process loads its shard of the model."""

from dlinfer.framework.mindie_ext.parallel.group import Group, join
from dlinfer.framework.mindie_ext.parallel.shard import load

__all__ = ["Group", "join", "load"]
