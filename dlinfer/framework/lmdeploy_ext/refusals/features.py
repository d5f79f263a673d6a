"""What is not served on our devices yet, refused by name before weights are loaded."""

import functools
from collections.abc import Callable
from typing import Any

from dlinfer.framework.lmdeploy_ext.conversion.plan import QUANTISED_FORMATS
from dlinfer.framework.lmdeploy_ext.device import activation, vendor_devices
from dlinfer.framework.lmdeploy_ext.device.refusing import refuse
from dlinfer.framework.lmdeploy_ext.layers.quantised import kv_quantisation
from dlinfer.framework.lmdeploy_ext.refusals import speculation, tensor_parallel
from dlinfer.framework.lmdeploy_ext.refusals.checkpoints import adapter_files
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


PATCHES = (
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
