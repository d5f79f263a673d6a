"""LoRA adapters of a generator. Each sequence of a batch may use another adapter."""

from dlinfer.framework.mindie_ext.adapters.manager import AdapterManager

__all__ = ["AdapterManager"]
