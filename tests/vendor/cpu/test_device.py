"""The host as a device of serving frameworks: what it sets for the libraries below torch."""

import json
import os
import re
import subprocess
import sys

import pytest

from dlinfer.vendor.cpu.device import CpuDevice

CODE = """
import json, os, sys
from pathlib import Path
import torch
from torch.nn.functional import linear
from dlinfer.vendor.cpu.device import CpuDevice

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

if sys.argv[1] == "device":
    CpuDevice()
weights = torch.randn(2048, 512).bfloat16(), torch.randn(512, 2048).bfloat16()
x = torch.randn(600, 512).bfloat16()
linear(linear(x, weights[0]), weights[1])
before = resident()
for rows in torch.randperm(500, generator=torch.Generator().manual_seed(0))[:200].tolist():
    linear(linear(x[: rows + 65], weights[0]), weights[1])
names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
print(json.dumps([resident() - before, [os.environ.get(name) for name in names]]))
"""


def run(way: str, **variables: str) -> tuple[float, list[str | None]]:
    command = [sys.executable, "-c", CODE, way]
    done = subprocess.run(command, env=os.environ | variables, check=True, capture_output=True, text=True)
    grown, names = json.loads(done.stdout.splitlines()[-1])
    return grown, names


def test_what_the_user_has_set_stays():
    _, names = run("device", ONEDNN_PRIMITIVE_CACHE_CAPACITY="7")
    assert names == ["7", "32"]


def test_prompts_of_all_lengths_do_not_fill_the_memory():
    """MiB after products of 200 numbers of rows: a few where few are kept, and a hundred where all are.

    With AMX both are four times as much.
    """
    kept, _ = run("device")
    everything, names = run("plain")
    assert kept < max(80, everything / 4), (kept, everything)
    if names == [None, None] and everything < 80:
        pytest.skip(f"on this CPU torch keeps {everything:.0f} MiB of 200 products, whatever is set")


def test_the_log_of_a_start_says_what_the_process_has_of_the_host():
    assert re.fullmatch(
        r".*\d+ cores?, .*\d+ NUMA nodes?: \d+ threads?; torch uses \d+", CpuDevice().description()
    )
