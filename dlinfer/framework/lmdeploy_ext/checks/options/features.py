"""What is not served on our devices yet, refused by name: options before weights load, calls before they begin."""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.checks.folder import adapter_files
from dlinfer.framework.lmdeploy_ext.checks.model import speculation, tensor_parallel
from dlinfer.framework.lmdeploy_ext.conversion.plan import QUANTISED_FORMATS
from dlinfer.framework.lmdeploy_ext.device import activation, ranks, vendor_devices
from dlinfer.framework.lmdeploy_ext.device.activation import refuse
from dlinfer.framework.lmdeploy_ext.faults.sampling import drafts
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.framework.patching import Patch

# field of PytorchEngineConfig -> (the value that means "not asked for", what to do instead)
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "dp": (1, "use dp=1"),
    "ep": (1, "use ep=1"),
    "enable_microbatch": (False, "leave enable_microbatch off"),
    "enable_eplb": (False, "leave enable_eplb off"),
    "empty_init": (False, "load the weights at start"),
    "model_format": (None, "use a model that is quantised, or one in float32, float16 or bfloat16"),
    "kv_transfer_config": (None, "leave kv_transfer_config out"),
    "dllm_block_length": (None, "use an autoregressive model"),
}

_SERVED_TOO = {"model_format": QUANTISED_FORMATS}
"""Values of those fields that ask for something that is served."""


def check_engine_config(config: Any) -> None:
    """Raise UnsupportedFeatureError for the first option that is not served."""
    device = config.device_type
    for name, (neutral, advice) in _NEUTRAL.items():
        value = getattr(config, name)
        if value != neutral and value and value not in _SERVED_TOO.get(name, ()):
            raise refuse(f"{name}={value!r}", advice, device)
    tensor_parallel.check_engine_config(config)
    kv_quantisation.check_engine_config(config)
    adapter_files.check_folders(config.adapters)
    if "memory_model_path" in (config.hf_overrides or {}):
        raise refuse("MemDecode (hf_overrides['memory_model_path'])", "leave it out", device)
    if config.role.name != "Hybrid":
        raise refuse(f"role={config.role.name}", "use EngineRole.Hybrid", device)
    if config.distributed_executor_backend not in ((None, "mp") if config.tp > 1 else (None, "uni")):
        raise refuse(
            f"distributed_executor_backend={config.distributed_executor_backend!r}",
            "leave it out; one process runs the model, and with tp=N so many that LMDeploy's 'mp' starts",
            device,
        )


def _update_engine_config(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def update_engine_config(engine_config: Any) -> Any:
        engine_config = original(engine_config)
        if activation.serves(engine_config.device_type):
            check_engine_config(engine_config)  # fields may have changed since the config was made
        vendor_devices.check_vendor(engine_config.device_type)
        activation.check_device(engine_config.device_type)
        if engine_config.tp > 1 and activation.serves(engine_config.device_type):
            activation.require(ranks.FEATURE)
        return engine_config

    return update_engine_config


def _specdecode_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_specdecode_config(
        target_model: str,
        speculative_config: Any,
        engine_config: Any,
        cache_config: Any,
        dist_config: Any,
        trust_remote_code: bool = False,
    ) -> Any:
        if speculative_config is not None and activation.serves(engine_config.device_type):
            speculation.check_request(speculative_config, engine_config)
            activation.require(drafts.FEATURE)
        return original(
            target_model, speculative_config, engine_config, cache_config, dist_config, trust_remote_code
        )

    return build_specdecode_config


def _sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def sleep(self: Any, level: int = 1) -> Any:
        if activation.active() is not None and level != 1:
            raise refuse(f"sleep(level={level!r})", "use level 1, which keeps the weights")
        return await original(self, level)

    return sleep


# New weights for an engine that runs. LMDeploy writes them by CUDA's handles or by Ray's workers, and its other
# executors raise an error without a word. Here weights may lie packed, in another layout than what would be sent.

_ENGINES = (
    "lmdeploy.pytorch.engine.engine:Engine",
    "lmdeploy.pytorch.engine.mp_engine.base:MPEngine",  # the server's; errors of its process arrive as bare text
)
_UPDATES_BY_A_GROUP = (
    "init_weights_update_group",
    "update_weights_from_distributed",
    "destroy_weights_update_group",
)


def _refuse_update(name: str) -> UnsupportedFeatureError:
    advice = "save them as a model folder, and start an engine with it"
    return refuse(f"{name}: new weights for a running engine", advice)


def _update_params(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_params(self: Any, request: Any) -> Any:
        if activation.active() is not None:
            raise _refuse_update(original.__name__)
        return original(self, request)

    return update_params


def _update_by_a_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def update(self: Any, request: Any) -> Any:
        if activation.active() is not None:
            raise _refuse_update(original.__name__)
        return await original(self, request)

    return update


PATCHES = (
    *(
        Patch(
            target=f"{engine}.{name}",
            why="its executors raise an error without a word, which the server answers with a bare 500",
            signature="(self, request)",
            build=_update_params if name == "update_params" else _update_by_a_group,
            essential=False,
        )
        for engine in _ENGINES
        for name in ("update_params", *_UPDATES_BY_A_GROUP)
    ),
    Patch(
        target="lmdeploy.serve.core.async_engine:AsyncEngine.sleep",
        why="level 2 throws the weights away, and waking up serves whatever is in memory",
        signature="(self, level=1)",
        build=_sleep,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.engine:Engine.sleep",
        why="the same, for users of the engine itself",
        signature="(self, level=1)",
        build=_sleep,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.config_builder:ConfigBuilder.update_engine_config",
        why="the first thing an engine does; options that are not served are refused here, before weights load",
        signature="(engine_config)",
        build=_update_engine_config,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.config_builder:ConfigBuilder.build_specdecode_config",
        why="drafts of which the tokens were never compared with those without",
        signature="(target_model, speculative_config, engine_config, cache_config, dist_config, "
        "trust_remote_code=False)",
        build=_specdecode_config,
    ),
)
