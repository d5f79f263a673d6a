"""The patch set of a process, and what of it a device cannot do without."""

import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from lmdeploy import PytorchEngineConfig
from lmdeploy.pytorch.config import ModelConfig
from lmdeploy.pytorch.configurations.utils import flash_mla_available
from lmdeploy.pytorch.engine.config_builder import ConfigBuilder
from transformers import LlamaConfig, PretrainedConfig

from dlinfer.errors import PatchError
from dlinfer.framework.lmdeploy_ext import install
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import image_prompts


def test_threads_that_ask_first_at_once_get_the_same_patches(monkeypatch):
    records = install._records
    met = threading.Barrier(2)

    def both_at_once():
        met.wait(300)
        return records()

    monkeypatch.setattr(activation, "_patches", None)
    monkeypatch.setattr(activation, "_records", both_at_once)
    found = []
    threads = [threading.Thread(target=lambda: found.append(activation.patches())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [activation.patches()] * 2


# Without any of these LMDeploy's answers on our devices are the same, if in other words or with less comfort.
DONE_WITHOUT = {
    "lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._should_defer_active_chunk",
    "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.do_prefill_default",
    "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync._make_forward_inputs",
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._async_model_forward",
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.async_forward",
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.get_logits",
    "lmdeploy.pytorch.weight_loader.model_weight_loader:process_weights_after_loading",
    "lmdeploy.cli.entrypoint:run",
    "lmdeploy.cli.utils:ArgumentHelper.add_spec_group",
    "lmdeploy.cli.utils:ArgumentHelper.cache_max_entry_count",
    "lmdeploy.cli.utils:ArgumentHelper.device",
    "lmdeploy.cli.utils:ArgumentHelper.max_prefill_token_num",
    "lmdeploy.cli.utils:FlexibleArgumentParser.parse_args",
    "lmdeploy.metrics.stats:SchedulerStats.update_from_schedule_metrics",
    "lmdeploy.pipeline:Pipeline.__init__",
    "lmdeploy.pipeline:Pipeline._request_generator",
    "lmdeploy.pytorch.config:_patch_quantization_config",
    "lmdeploy.pytorch.configurations.deepseek_v4:get_v4_compress_ratios",
    "lmdeploy.pytorch.engine.engine:Engine.get_local_health_status",
    "lmdeploy.pytorch.engine.engine_loop:EngineLoop._make_infer_outputs",
    "lmdeploy.pytorch.engine.engine:Engine.get_schedule_metrics",
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._adjust_block_size",
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._maybe_disable_unsupported_prefix_caching",
    "lmdeploy.pytorch.engine.executor.base:ExecutorBase._get_dsa_score_workspace_size",
    "lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor.sampling",
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine.__init__",
    "lmdeploy.pytorch.engine.mp_engine.zmq_engine:ZMQMPEngine._start_mp_proc",
    "lmdeploy.pytorch.engine.mp_engine.zmq_rpc:AsyncRPCClient.close_sockets",
    "lmdeploy.serve.core.async_engine:AsyncEngine._request_error_from_status",
    "lmdeploy.serve.core.async_engine:AsyncEngine.async_get_reward_score",
    "lmdeploy.serve.core.health:EngineHealthMonitor.stop",
    "lmdeploy.serve.openai.chat_completions.logits_processors:logit_bias_logits_processor",
    "lmdeploy.serve.openai.endpoints.common:validate_request",
    "lmdeploy.serve.utils.server_utils:EngineSleepingMiddleware.__call__",
    "lmdeploy.pipeline:Pipeline.get_reward_score",
    "lmdeploy.pytorch.engine.engine:Engine._get_max_session_len",
    "lmdeploy.pytorch.engine.mp_engine.base_worker:StreamMailbox.publish",
    "lmdeploy.serve.anthropic.adapter:map_finish_reason",
    "lmdeploy.serve.anthropic.endpoints.messages:register",
    "lmdeploy.serve.anthropic.streaming:_format_sse",
    "lmdeploy.serve.core.chat_runner:_normalize_runner_gen_config_kwargs",
    "lmdeploy.serve.openai.chat_completions.logprobs:_create_chat_completion_logprobs",
    "lmdeploy.serve.openai.endpoints.generate:_create_top_logprobs",
    "lmdeploy.serve.openai.responses.request:check_request",
    "lmdeploy.serve.openai.responses.request:warn_ignored_request_fields",
    "lmdeploy.serve.parsers.response_parser:validate_parser_names",
    "lmdeploy.serve.utils.server_utils:validate_json_request",
    "lmdeploy.tokenizer:HuggingFaceTokenizer.__init__",
    "lmdeploy.utils:get_model",
    "lmdeploy.tokenizer:GptOssTokenizer.__init__",
    "lmdeploy.tokenizer:GptOssTokenizer.detokenize_incrementally",
    *(
        f"lmdeploy.pytorch.engine.{engine}.{name}"
        for engine in ("engine:Engine", "mp_engine.base:MPEngine")
        for name in (
            "update_params",
            "init_weights_update_group",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "destroy_weights_update_group",
        )
    ),
}


def test_what_is_not_essential_is_known_by_name():
    assert {patch.target for patch in activation.patches().patches if not patch.essential} == DONE_WITHOUT


@pytest.fixture
def refuse(monkeypatch):
    """Lets a patch of this process be one that does not fit."""

    def refuse(target):
        error = PatchError(target=target, package="lmdeploy", version="0.18.9", detail="for the test")
        monkeypatch.setitem(activation.patches().refused, target, error)

    monkeypatch.setattr(activation, "_told", set())
    return refuse


@pytest.mark.parametrize("target", sorted(DONE_WITHOUT))
def test_a_misfit_of_comfort_leaves_the_device_on_and_is_told(target, refuse, caplog):
    PytorchEngineConfig(device_type="cpu")
    refuse(target)
    with caplog.at_level(logging.WARNING, "dlinfer"):
        install.on_import(None)
        install.on_import(None)
        config = PytorchEngineConfig(device_type="cpu", max_batch_size=1)
        ConfigBuilder.update_engine_config(config)
    assert caplog.text.count(target) == 1


def test_a_misfit_of_one_model_stops_that_model_alone(refuse, caplog):
    PytorchEngineConfig(device_type="cpu")
    target = "lmdeploy.pytorch.configurations.deepseek_v32:DeepseekV32ModelConfigBuilder.build"
    refuse(target)
    with caplog.at_level(logging.WARNING, "dlinfer"):
        install.on_import(None)
    assert f"does not work for deepseek_v32, glm_moe_dsa: the patch on {target}" in caplog.text
    config = PytorchEngineConfig(device_type="cpu", max_batch_size=1)
    ConfigBuilder.update_engine_config(config)
    llama = LlamaConfig(architectures=["LlamaForCausalLM"])
    ModelConfig.from_hf_config(llama, dtype="float32", device_type="cpu")
    refused: Any = PretrainedConfig()
    refused.model_type = "deepseek_v32"
    with pytest.raises(PatchError, match="deepseek_v32"):
        ModelConfig.from_hf_config(refused, device_type="cpu")
    ConfigBuilder.update_engine_config(config)  # another engine, of another model


def test_a_misfit_of_what_is_essential_is_an_error_even_when_it_is_met_late(refuse):
    config = PytorchEngineConfig(device_type="cpu", max_batch_size=1)
    refuse("lmdeploy.pytorch.engine.model_agent.agent:_try_to_cuda")
    with pytest.raises(PatchError, match="_try_to_cuda"):
        PytorchEngineConfig(device_type="cpu")
    with pytest.raises(PatchError, match="_try_to_cuda"):
        ConfigBuilder.update_engine_config(config)


def test_the_device_view_answers_what_lmdeploy_asks_of_cuda_for_deepseek():
    PytorchEngineConfig(device_type="cpu")
    assert flash_mla_available() is False


def test_every_file_with_patches_is_in_the_list():
    folder = Path(install.__file__).parent
    having = {
        ".".join(("dlinfer.framework.lmdeploy_ext", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
        if re.search(
            r"^PATCHES\b(?! = PatchSet)|^(@|\w+ = (functools\.partial\()?)(replaces|corrects)\b",
            path.read_text(),
            re.MULTILINE,
        )  # those on LMDeploy
    }
    makers = {image_prompts.__name__}  # of patches that the modules of models list
    listed = {patch.build.__module__ for patch in install._records()} - makers
    on_transformers = {install.byte_order_mark.__name__}
    assert having - on_transformers == listed


def test_every_corrected_fault_has_a_range_of_releases():
    faults = [patch for patch in install._records() if ".faults." in patch.home]
    assert faults and all(patch.versions for patch in faults)


def test_a_fault_names_the_thread_that_reports_it():
    reported = {patch.upstream for patch in install._records()} - {""}
    assert len(reported) >= 5
    for address in reported:
        assert re.fullmatch(
            r"https://github\.com/(InternLM/lmdeploy|mlc-ai/xgrammar)/(issues|pull)/\d+", address
        )
