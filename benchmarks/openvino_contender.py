"""One backend on one model of ``benchmarks.openvino_backend``, which takes orders as ``benchmarks.orders`` says.

python -m benchmarks.openvino_contender BACKEND MODEL '{"layers": 4}'
"""

import json
import sys

from benchmarks.openvino_backend import Caller
from benchmarks.orders import take_orders

if __name__ == "__main__":
    backend, name, options = sys.argv[1:]
    take_orders(lambda: Caller(backend, name, **json.loads(options)))
