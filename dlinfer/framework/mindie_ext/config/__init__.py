"""The model_config of a generator: its keys, and the checks that run before anything is loaded."""

from dlinfer.framework.mindie_ext.config.check import check_model_config
from dlinfer.framework.mindie_ext.config.model_config import ModelConfig
from dlinfer.framework.mindie_ext.config.visible_devices import visible_devices

__all__ = ["ModelConfig", "check_model_config", "visible_devices"]
