"""Run checks in a process with the vendor's package: ``python -m tests.vendor.ascend.graph.run_checks FILE``.

Its end would call the driver, which is not here, so the process leaves without it.
"""

import os
import sys

import pytest

from tests.vendor.ascend.graph import vendor_process

if __name__ == "__main__":
    vendor_process.prepare()
    options = ("-q", "-n0", "-m", "", "-p", "no:cacheprovider", "--show-capture=no")
    status = pytest.main([*options, *sys.argv[1:]])
    sys.stdout.flush()
    os._exit(status)
