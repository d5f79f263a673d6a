"""LMDeploy on a device_type, as a user would write it: prints the tokens of prompts, and what the device was asked.

python lmdeploy_job.py MODEL DEVICE_TYPE MODE..., each mode "eager" or "graph"
"""

import json
import sys
from typing import Any

import torch
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog"]
GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False, ignore_eos=True)
SAMPLED = GenerationConfig(
    max_new_tokens=8, do_sample=True, top_k=20, temperature=1.5, random_seed=7, ignore_eos=True
)


def answer(model: str, device_type: str, mode: str) -> dict[str, Any]:
    config = PytorchEngineConfig(
        device_type=device_type,
        dtype="float32",
        eager_mode=mode == "eager",
        session_len=256,
        block_size=16,
    )
    with pipeline(model, backend_config=config) as pipe:  # pyright: ignore[reportCallIssue]
        return {
            "greedy": [r.token_ids for r in pipe(PROMPTS, gen_config=GREEDY, do_preprocess=False)],
            "sampled": [r.token_ids for r in pipe(PROMPTS, gen_config=SAMPLED, do_preprocess=False)],
            "devices": devices(pipe),
            "phases": phases(),
        }


def phases() -> list[Any]:
    """(phase, engine) of each graph of the engines that exist now."""
    from dlinfer.framework.lmdeploy_ext.running import graph_runner

    found = [phase for runner in graph_runner.counts() for phase in runner.phases]
    return [[phase.phase, phase.report and phase.report.engine] for phase in found]


def devices(pipe: Any) -> list[str]:
    """Device types of the model's weights and of the KV cache."""
    agent = pipe.async_engine.engine.executor.model_agent
    caches = [tensor for pair in agent.cache_engine.gpu_cache for tensor in pair]
    return sorted({one.device.type for one in (*caches, *agent.patched_model.get_model().parameters())})


def main() -> None:
    model, device_type, *modes = sys.argv[1:]
    found: dict[str, Any] = {mode: answer(model, device_type, mode) for mode in modes}
    from lmdeploy.pytorch.backends.selector import get_backend
    from lmdeploy.utils import get_max_batch_size

    backend: Any = get_backend(device_type)
    found["backend"] = [backend.get_name(), backend.ccl_backend(), get_max_batch_size(device_type)]
    found["phases"] = [phase for mode in modes for phase in found[mode].pop("phases")]
    if "fake_accel.device" in sys.modules:
        from fake_accel import device, kernels

        found |= {"asked": dict(device.asked), "calls": dict(kernels.calls)}
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
