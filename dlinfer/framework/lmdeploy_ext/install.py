"""The patches on LMDeploy, all in one list, put in place as LMDeploy's modules appear.

They are applied whenever LMDeploy is imported, since modules copy each other's names while they load; each one leaves
LMDeploy's own devices to the original.
"""

from collections.abc import Iterable
from types import ModuleType

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults.models import byte_order_mark
from dlinfer.framework.patching import Patch, patches_of


def _records() -> list[Patch]:
    # ruff: noqa: F401 - every module that is imported here holds patches
    from dlinfer.framework.lmdeploy_ext import command_line, engine_config
    from dlinfer.framework.lmdeploy_ext.checks.folder import model_folder
    from dlinfer.framework.lmdeploy_ext.checks.model import adapter_fit, build, config, weights
    from dlinfer.framework.lmdeploy_ext.checks.options import features
    from dlinfer.framework.lmdeploy_ext.checks.request import (
        generation_options,
        http_errors,
        media,
        prompts,
        unread_fields,
    )
    from dlinfer.framework.lmdeploy_ext.conversion import loading
    from dlinfer.framework.lmdeploy_ext.device import cache_blocks, kv_memory, patches, ranks
    from dlinfer.framework.lmdeploy_ext.faults.answers import (
        completions,
        harmony,
        logprobs,
        marked_text,
        parser_names,
        required_calls,
        rewards,
        stop_sequences,
        text,
    )
    from dlinfer.framework.lmdeploy_ext.faults.models import (
        cogvlm,
        glm4_1v,
        glm_4v,
        llava,
        model_classes,
        one_position,
        qwen2_vl,
    )
    from dlinfer.framework.lmdeploy_ext.faults.sampling import (
        drafts,
        float_logits,
        grammars,
        min_new_tokens,
        mixed_prefill,
        no_new_tokens,
        penalties,
        scaled_logits,
        steps,
    )
    from dlinfer.framework.lmdeploy_ext.faults.serving import (
        generation,
        health_monitor,
        left_streams,
        process,
        unsent_messages,
    )
    from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta_model
    from dlinfer.framework.lmdeploy_ext.layers.moe import experts_model, packed_experts_model
    from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters
    from dlinfer.framework.lmdeploy_ext.layers.sparse_attention import indexer_model
    from dlinfer.framework.lmdeploy_ext.sampling import logit_bias, sparse_logit_writes, token_draws
    from dlinfer.framework.lmdeploy_ext.stepping import (
        chunk_turns,
        joined_forward,
        last_token_rows,
        prompt_turns,
        step_thread,
    )
    from dlinfer.framework.lmdeploy_ext.vision import image_files, processors

    modules = [value for value in locals().values() if isinstance(value, ModuleType)]
    return [patch for module in modules for patch in patches_of(module, "lmdeploy")]


def _changed() -> Iterable[tuple[Patch, str]]:
    from dlinfer.framework.lmdeploy_ext.contract import bodies

    patches = activation.patches()
    return bodies.changed(filter(patches.needs, patches.patches), patches.version())


activation.provide(_records, _changed)


def on_import(module: ModuleType | None) -> None:
    """Called at each import of an LMDeploy module, with the module once it has been executed."""
    activation.patches().apply_loaded()
    byte_order_mark.OF_TRANSFORMERS.apply_loaded()
    activation.tell_of_misfits()
    if activation.active() is not None and module is not None:
        from dlinfer.framework.lmdeploy_ext.device import view

        view.cover(module)
