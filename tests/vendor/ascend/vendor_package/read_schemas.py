"""Run in a process of its own: loads torch_npu on stubs and prints the schema of each op that it declares."""

import os
import sys

import torch
import torch_npu  # pyright: ignore[reportMissingImports] # noqa: F401 - what it declares is read below

for schema in torch._C._jit_get_all_schemas():
    if schema.name.partition("::")[0] in ("npu", "atb"):
        print(schema)
sys.stdout.flush()
os._exit(0)  # its ending would call the driver
