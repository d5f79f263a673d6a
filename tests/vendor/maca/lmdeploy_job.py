"""LMDeploy on a device_type, by the job of Ascend's tests: prints the tokens of prompts, and what the card was asked.

python lmdeploy_job.py MODEL DEVICE_TYPE DTYPE
"""

import contextlib
import io
import json

import torch

from tests.vendor.ascend import lmdeploy_job
from tests.vendor.maca.simulated_card import calling


def main() -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        lmdeploy_job.main()
    found = json.loads(said.getvalue().splitlines()[-1])
    found["calls"] = dict(calling.calls)
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
