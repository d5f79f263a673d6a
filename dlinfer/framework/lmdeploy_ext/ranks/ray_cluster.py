"""Starts a model's ranks on the nodes of a Ray cluster, for devices that use the host's CPUs and memory.

LMDeploy's RayExecutor supports only cards. It requests cards from Ray, packs ranks on as few nodes as possible, and
does not pass dlinfer's settings to the ranks. Here each rank requests one CPU, the ranks are spread over the nodes, and
each rank gets dlinfer's settings.
"""

import os
from collections import Counter
from typing import Any

import torch

from dlinfer import ops
from dlinfer.framework.lmdeploy_ext.device import activation, devices, ranks
from dlinfer.framework.patching import Original, replaces

FEATURE = "Ray"
_RESOURCE = "CPU"
_SENT = ("DLINFER_", "GLOO_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Prefixes of the environment variables that ranks get from the engine's process, besides LMDeploy's LMDEPLOY_*."""
_THREADS = "OMP_NUM_THREADS"


def is_served(device_type: str) -> bool:
    """Return whether the ranks of a device type can be started by Ray."""
    return devices.shares_host(device_type)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_SENT)}


@replaces(
    "lmdeploy.pytorch.engine.executor:get_distributed_executor_backend",
    why="chooses Ray whenever the backend supports it, even on one host",
    when=activation.is_on,
    for_feature=ranks.FEATURE,
)
def _executor_backend(
    original: Original, world_size: int, dp: int, device_type: str, logger: Any = None
) -> str:
    from lmdeploy.pytorch import envs

    chosen = original(world_size, dp, device_type, logger)
    return chosen if envs.executor_backend or world_size == 1 or not is_served(device_type) else "mp"


@replaces(
    "lmdeploy.pytorch.ray:get_device_str",
    why="knows Ray's resource names of cards only",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _device_str(original: Original, device_type: str | None = None) -> str:
    name = device_type or activation.active()
    return _RESOURCE if name is not None and is_served(name) else original(device_type)


@replaces(
    "lmdeploy.pytorch.ray:init_ray_cluster",
    why="packs ranks on as few nodes as possible, though each node has CPUs for all of them",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _init_ray_cluster(
    original: Original,
    world_size: int,
    ray_address: str | None = None,
    dp: int = 1,
    device_type: str = "cuda",
) -> tuple[Any, bool]:
    import ray

    pack = ray.util.placement_group
    if not is_served(device_type):
        return original(world_size, ray_address, dp, device_type)

    def spread(bundles: list[dict[str, float]], strategy: str = "PACK", **more: Any) -> Any:
        return pack(bundles, strategy="SPREAD", **more)

    ray.util.placement_group = spread  # LMDeploy calls placement_group only in the original
    try:
        return original(world_size, ray_address, dp, device_type)
    finally:
        ray.util.placement_group = pack


_EXECUTOR = "lmdeploy.pytorch.engine.executor.ray_executor:RayExecutor"


@replaces(
    f"{_EXECUTOR}._init_workers_ray",
    why="requests 'CPU' as a resource by name, which Ray refuses, and sends no dlinfer setting to other nodes",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _init_workers(original: Original, self: Any, placement_group: Any, worker_kwargs: dict[str, Any]) -> Any:
    if not is_served(self.device_type):
        return original(self, placement_group, worker_kwargs)
    import ray
    from lmdeploy.pytorch.engine.executor import ray_executor
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    environment = ray_executor._update_runtime_envs({"env_vars": _variables()})
    bundles = [place for place, bundle in enumerate(placement_group.bundle_specs) if bundle.get(_RESOURCE)]
    workers: list[Any] = []
    for place in bundles[: self.dist_config.attn_tp]:
        strategy = PlacementGroupSchedulingStrategy(placement_group, place, True)
        actor: Any = ray.remote(num_cpus=1, scheduling_strategy=strategy, runtime_env=environment)
        workers.append(actor(ray_executor.RayWorkerWrapper).remote(**worker_kwargs))
    return workers


@replaces(
    f"{_EXECUTOR}._init_distributed_environment_by_device",
    why="raises for devices that it does not know, and leaves each rank with Ray's single thread",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _init_environment(original: Original, self: Any, device_str: str) -> None:
    if not is_served(device_str):
        original(self, device_str)
        return
    import ray
    from lmdeploy.pytorch.engine.executor import ray_executor

    self.workers = self._sort_workers(ray_executor._get_master_addr(), self.workers)
    if _THREADS not in os.environ:  # not the user's choice: Ray sets it to 1 in its workers
        ray.get([worker.set_env.remote({_THREADS: ""}) for worker in self.workers])
    ranks_of: Counter[str] = Counter()
    for worker, node in zip(
        self.workers, ray.get([w.get_node_ip.remote() for w in self.workers]), strict=True
    ):
        ray.get(worker.set_device.remote(ranks_of[node]))
        ranks_of[node] += 1


@replaces(
    "lmdeploy.pytorch.engine.executor.ray_executor:RayWorkerWrapper.warmup_dist",
    why="sums a tensor on 'cuda'",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _warm_up(original: Original, self: Any) -> None:
    ops.all_reduce(torch.zeros(1, device=activation.torch_device()), self.dist_ctx.tp_group.gpu_group)
