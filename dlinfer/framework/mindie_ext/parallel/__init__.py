"""A model that is spread over ranks: processes that join, and load their shares."""

from dlinfer.framework.mindie_ext.parallel.group import Group, join
from dlinfer.framework.mindie_ext.parallel.shard import load

__all__ = ["Group", "join", "load"]
