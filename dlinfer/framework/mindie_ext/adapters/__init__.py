"""LoRA adapters of a generator: each sequence of a batch may have its own."""

from dlinfer.framework.mindie_ext.adapters.manager import AdapterManager

__all__ = ["AdapterManager"]
