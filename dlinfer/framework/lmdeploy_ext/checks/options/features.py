"""Refuses engine options and engine calls that our devices do not serve. Options are checked before weights load."""

from typing import Any

from dlinfer.framework.lmdeploy_ext.checks.model import adapters, invariance, speculation, tensor_parallel
from dlinfer.framework.lmdeploy_ext.conversion.plan import QUANTISED_FORMATS
from dlinfer.framework.lmdeploy_ext.device import activation, ranks, vendor_devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.faults.sampling import drafts
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.framework.lmdeploy_ext.ngram import method as ngram
from dlinfer.framework.lmdeploy_ext.ranks import ray_cluster
from dlinfer.framework.patching import Original, replaces

_FLOATS = "use a checkpoint that is already quantised, or a model in float32, float16 or bfloat16"
_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dp": ((1,), "use dp=1"),
    "ep": ((1,), "use ep=1"),
    "enable_microbatch": ((), "leave enable_microbatch off"),
    "enable_eplb": ((), "leave enable_eplb off"),
    "empty_init": ((), "leave empty_init off, so that the weights load at start"),
    "model_format": (QUANTISED_FORMATS, _FLOATS),
    "kv_transfer_config": ((), "leave kv_transfer_config out"),
}
"""Field of PytorchEngineConfig -> (served values, the user's next step). None, False and 0 are always served."""


def check_engine_config(config: Any) -> None:
    """Raise an error for the first option that is not served. config: a PytorchEngineConfig.

    The error is UnsupportedFeatureError, or AdapterFolderError for an adapter.
    """
    device = config.device_type
    for name, (served, advice) in _SERVED.items():
        value = getattr(config, name)
        if value and value not in served:
            raise refuse(f"{name}={value!r}", advice, device)
    tensor_parallel.check_engine_config(config)
    invariance.check_engine_config(config)
    kv_quantisation.check_engine_config(config)
    adapters.check_engine_config(config)
    if "memory_model_path" in (config.hf_overrides or {}):
        raise refuse("MemDecode (hf_overrides['memory_model_path'])", "leave it out", device)
    if config.role.name != "Hybrid":
        raise refuse(f"role={config.role.name}", "use EngineRole.Hybrid", device)
    _check_executor(config)


def _check_executor(config: Any) -> None:
    from lmdeploy.pytorch import envs

    served = (
        ["uni"] if config.tp == 1 else ["mp", *(["ray"] if ray_cluster.is_served(config.device_type) else [])]
    )
    advice = "leave it out: LMDeploy then runs the model in one process, or in N processes with tp=N"
    for name, executor in (
        ("distributed_executor_backend", config.distributed_executor_backend),
        ("LMDEPLOY_EXECUTOR_BACKEND", envs.executor_backend),
    ):
        if executor is not None and executor not in served:
            raise refuse(f"{name}={executor!r}", advice, config.device_type)


def _uses_ray(config: Any) -> bool:
    from lmdeploy.pytorch import envs

    return "ray" in (config.distributed_executor_backend, envs.executor_backend)


@replaces(
    "lmdeploy.pytorch.engine.config_builder:ConfigBuilder.update_engine_config",
    why="accepts options that the device does not serve",
)
def update_engine_config(original: Original, engine_config: Any) -> Any:
    config = original(engine_config)
    if activation.serves(config.device_type):
        check_engine_config(config)  # fields may have changed since the config was made
    vendor_devices.check_vendor(config.device_type)
    activation.check_device(config.device_type)
    return config


@replaces(
    "lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_specdecode_config",
    why="accepts drafts whose tokens were never compared with the tokens that the target generates alone",
)
def build_specdecode_config(
    original: Original,
    target_model: str,
    speculative_config: Any,
    engine_config: Any,
    cache_config: Any,
    dist_config: Any,
    trust_remote_code: bool = False,
) -> Any:
    is_served = activation.serves(engine_config.device_type)
    if is_served and engine_config.tp > 1:
        activation.require(ranks.FEATURE, *((ray_cluster.FEATURE,) if _uses_ray(engine_config) else ()))
    if is_served and speculative_config is not None:
        invariance.check_drafts(engine_config)
        speculation.check_request(speculative_config, engine_config)
        activation.require(drafts.FEATURE)
        if speculative_config.method == ngram.METHOD:
            activation.require(ngram.FEATURE)
            return ngram.config(speculative_config.num_speculative_tokens, dist_config)
    configs = (engine_config, cache_config, dist_config)
    return original(target_model, speculative_config, *configs, trust_remote_code)


async def _sleep(original: Original, self: Any, level: int = 1) -> Any:
    if level != 1:
        raise refuse(f"sleep(level={level!r})", "use level 1, which keeps the weights")
    config = getattr(self, "engine_config", None) or getattr(self, "backend_config", None)
    tp = getattr(config, "tp", 1)
    if tp > 1:  # LMDeploy's executor of several processes may lose a message when it wakes up
        raise refuse(f"sleep with tp={tp}", "end the engine, and start it again when you need it")
    return await original(self, level)


# Updates of a running engine's weights. LMDeploy writes new weights through CUDA handles or Ray workers, and its other
# executors raise an error without a text. Our weights may also be packed, unlike the weights that are sent.

_ENGINES = (
    "lmdeploy.pytorch.engine.engine:Engine",
    "lmdeploy.pytorch.engine.mp_engine.base:MPEngine",  # the server's engine; errors of its process arrive as bare text
)
_UPDATES = (
    "update_params init_weights_update_group update_weights_from_distributed destroy_weights_update_group"
)


def _refuse_update(original: Original, self: Any, request: Any) -> Any:
    advice = "save the new weights as a model folder, and start an engine with this folder"
    raise refuse(f"{original.__name__}: new weights for a running engine", advice)


def _refuse_ipc_update(original: Original, self: Any, request: Any, reject_reason: str | None = None) -> Any:
    _refuse_update(original, self, request)


_NO_TEXT = "raises an error without a text, which the server answers with HTTP status 500 and no reason"
_NEEDS_CUDA = "needs CUDA, and answers that a package is missing and that weights may be partially updated"
_REFUSALS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_UPDATES.split(), (_refuse_update, _NO_TEXT)),
    "update_weights_from_ipc": (_refuse_ipc_update, _NEEDS_CUDA),
}
"""Method of an engine -> (what replaces it, why)."""

PATCHES = (
    *(
        replaces(f"{engine}.{name}", why=why, when=activation.is_on, essential=False)(refusal)
        for engine in _ENGINES
        for name, (refusal, why) in _REFUSALS.items()
    ),
    *(
        replaces(
            f"{owner}.sleep",
            why="discards the weights at level 2, so the engine computes with undefined weights after waking up; "
            "with several processes requests may wait forever after waking up",
            when=activation.is_on,
        )(_sleep)
        for owner in ("lmdeploy.serve.core.async_engine:AsyncEngine", "lmdeploy.pytorch.engine.engine:Engine")
    ),
)
