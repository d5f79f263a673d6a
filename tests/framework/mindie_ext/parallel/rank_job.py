"""One rank: generates, writes what it gave to a file, and may wait to be killed.

``python rank_job.py RANK WORLD_SIZE PORT MODEL OUT WHAT``; WHAT is "tokens", "wait between steps" or "steps for ever".
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from dlinfer.errors import DlinferError
from dlinfer.framework.mindie_ext import GeneratorTorch, ModelInput
from dlinfer.framework.mindie_ext.batch.request import sampling_record
from tests.framework.mindie_ext.generators import Blocks, config_of, run

PROMPTS = [[5, 17, 33], [9], [100, 200, 300, 400, 500, 600, 700, 800, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]


def main() -> None:
    rank, world_size, port, model, out, what = (*sys.argv[1:7],)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    file = Path(out)
    try:
        generator = GeneratorTorch(
            config_of(Path(model), rank=int(rank), local_rank=int(rank), npu_device_id=int(rank))
            | {"world_size": int(world_size)}
        )
        blocks = Blocks(16)
        new = 12 if what == "tokens" else 450
        requests = [blocks.request(number, prompt, new) for number, prompt in enumerate(PROMPTS)]
        if what == "tokens":
            drawn = blocks.request(
                9, PROMPTS[2], 12, sampling_record(do_sample=True, temperature=1.5, top_k=50)
            )
            tokens = run(generator, requests) + run(generator, [drawn])
            torch.save(generator.forward(prompt_alone()), file.with_suffix(".pt"))
            file.write_text(json.dumps({"tokens": tokens}))
            return
        generator.prefill(requests)
        file.with_suffix(".ready").write_text("")
        if what == "wait between steps":
            while not file.with_suffix(".go").exists():
                time.sleep(0.05)
        while True:
            generator.decode(requests[:1])
            state = generator.store.get(0)
            if state is not None and len(state.tokens) > 400:  # begin anew before it outgrows its blocks
                generator.prefill(requests)
    except DlinferError as error:
        file.write_text(json.dumps({"error": type(error).__name__, "text": str(error), "at": time.time()}))


def prompt_alone() -> ModelInput:
    """The longest prompt, of which the logits of all tokens are wanted."""
    count = len(PROMPTS[2])
    lengths = np.asarray([count])
    return ModelInput(
        np.asarray(PROMPTS[2]), None, np.asarray([[0, 1]]), np.arange(count), lengths, count, None, True
    )


if __name__ == "__main__":
    main()
