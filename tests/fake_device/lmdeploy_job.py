"""LMDeploy on a device_type, as a user would write it: prints the tokens of some prompts, and what the device was asked.

    python lmdeploy_job.py MODEL DEVICE_TYPE eager|graph
"""

import json
import sys

import torch
from lmdeploy import GenerationConfig, PytorchEngineConfig, pipeline

PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog", "a"]


def main() -> None:
    model, device_type, mode = sys.argv[1:]
    config = PytorchEngineConfig(
        device_type=device_type,
        dtype="float32",
        eager_mode=mode == "eager",
        cache_max_entry_count=0.01 if device_type == "cpu" else 0.8,
        session_len=256,
        block_size=16,
    )
    greedy = GenerationConfig(max_new_tokens=12, do_sample=False, ignore_eos=True)
    sampled = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=20, temperature=1.5, random_seed=7, ignore_eos=True)
    with pipeline(model, backend_config=config) as pipe:
        found = {
            "greedy": [r.token_ids for r in pipe(PROMPTS, gen_config=greedy, do_preprocess=False)],
            "sampled": [r.token_ids for r in pipe(PROMPTS, gen_config=sampled, do_preprocess=False)],
            "device": where(pipe),
        }
    from dlinfer.framework.lmdeploy_ext.layers import graph_runner

    found["phases"] = [[p.phase, p.outcome] for runner in graph_runner.counts() for p in runner.phases]
    found["engines"] = sorted({p.report.engine for r in graph_runner.counts() for p in r.phases if p.report is not None})
    if device_type != "cpu":
        from fake_accel import device, kernels

        found |= {"asked": dict(device.asked), "calls": dict(kernels.calls)}
    print(json.dumps(found))


def where(pipe) -> list[str]:
    """Device types of the model's weights and of the KV cache, and the batch size."""
    agent = pipe.async_engine.engine.executor.model_agent
    caches = [tensor for pair in agent.cache_engine.gpu_cache for tensor in pair]
    weights = agent.patched_model.get_model().parameters()
    return sorted({tensor.device.type for tensor in (*caches, *weights) if isinstance(tensor, torch.Tensor)})


if __name__ == "__main__":
    main()
