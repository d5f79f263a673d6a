"""The LMDeploy adaptor: ``PytorchEngineConfig(device_type="cpu")`` is the user's only change.

torch's autoload entry point puts it in place when LMDeploy is imported. Where that is switched off
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), ``import dlinfer.framework.lmdeploy_ext`` before LMDeploy is used does the
same; it is also the module that LMDeploy itself imports for its out-of-tree devices.
"""

import sys

from dlinfer._autoload import install as _install_finder
from dlinfer.framework.lmdeploy_ext import install as _adaptor

_install_finder()
if "lmdeploy" in sys.modules:
    _adaptor.on_import(None)
