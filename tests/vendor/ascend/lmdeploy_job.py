"""LMDeploy on a device_type, as a user would write it: prints the tokens of prompts, and what the NPU was asked.

python lmdeploy_job.py MODEL DEVICE_TYPE DTYPE [captured]
"""

import json
import sys
from typing import Any

import torch
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog"]
GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False, ignore_eos=True)
LONG = "the quick brown fox " * 12


def main() -> None:
    model, device_type, dtype, *how = sys.argv[1:]
    config = PytorchEngineConfig(
        device_type=device_type,
        dtype=dtype,
        eager_mode=not how,
        session_len=512,
        max_prefill_token_num=64,
    )
    found: dict[str, Any] = {}
    with pipeline(model, backend_config=config) as pipe:  # pyright: ignore[reportCallIssue]
        found["short"] = [r.token_ids for r in pipe(PROMPTS, gen_config=GREEDY, do_preprocess=False)]
        # a prompt that is computed in pieces: the later ones attend to pages
        found["long"] = [r.token_ids for r in pipe([LONG], gen_config=GREEDY, do_preprocess=False)]
        agent = pipe.async_engine.engine.executor.model_agent
        caches = [tensor for pair in agent.cache_engine.gpu_cache for tensor in pair]
        weights = agent.patched_model.get_model().parameters()
        found["devices"] = sorted({one.device.type for one in (*caches, *weights)})
        found["again"] = [r.token_ids for r in pipe(PROMPTS, gen_config=GREEDY, do_preprocess=False)]
        found["three"] = [
            r.token_ids for r in pipe([*PROMPTS, "again"], gen_config=GREEDY, do_preprocess=False)
        ]
        found["block_size"] = agent.cache_config.block_size
        if how:
            from dlinfer.framework.lmdeploy_ext.running.capture import runner

            found["captured"] = [vars(one) for one in runner.counts()]
    simulation = sys.modules.get("tests.vendor.ascend.simulated_npu.install")
    from dlinfer.ops.core import fallback

    found["calls"] = {} if simulation is None else dict(simulation.calls)
    found["fallbacks"] = [[kind.op, kind.reason, count] for kind, count in fallback.counts().items()]
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
