"""The LMDeploy adaptor: ``PytorchEngineConfig(device_type="cpu")`` is the user's only change.

torch's autoload entry point installs the adaptor when LMDeploy is imported. If autoload is switched off
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), write ``import dlinfer.framework.lmdeploy_ext`` before LMDeploy is used.
LMDeploy itself also imports this module for its out-of-tree devices.
"""

import sys

from dlinfer._autoload import install as _install_finder
from dlinfer.framework.lmdeploy_ext import install as _adaptor

_install_finder()
if "lmdeploy" in sys.modules:
    _adaptor.on_import(None)
