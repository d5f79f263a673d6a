"""The patches on LMDeploy, all in one list, put in place as LMDeploy's modules appear.

They are applied whenever LMDeploy is imported, since modules copy each other's names while they load; each one leaves
LMDeploy's own devices to the original.
"""

from collections.abc import Iterable
from types import ModuleType

from dlinfer.framework.lmdeploy_ext.checks.folder import byte_order_mark
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Patch, patches_of


def _records() -> list[Patch]:
    from dlinfer.framework.lmdeploy_ext import engine_config
    from dlinfer.framework.lmdeploy_ext.answers import completions, logprobs, rewards, text
    from dlinfer.framework.lmdeploy_ext.checks.folder import (
        adapter_checks,
        model_checks,
        weight_checks,
    )
    from dlinfer.framework.lmdeploy_ext.checks.model import model_build, model_config
    from dlinfer.framework.lmdeploy_ext.checks.options import features as refusals
    from dlinfer.framework.lmdeploy_ext.checks.request import (
        generation_options,
        http_errors,
        media,
        prompts,
        unread_fields,
    )
    from dlinfer.framework.lmdeploy_ext.conversion import loading
    from dlinfer.framework.lmdeploy_ext.device import cache_blocks, cli, kv_memory, ranks
    from dlinfer.framework.lmdeploy_ext.device import patches as device_patches
    from dlinfer.framework.lmdeploy_ext.faults import (
        generation,
        grammars,
        harmony,
        left_streams,
        marked_text,
        min_new_tokens,
        parser_names,
        required_calls,
        scoring,
        stop_sequences,
    )
    from dlinfer.framework.lmdeploy_ext.faults import process as serving
    from dlinfer.framework.lmdeploy_ext.faults import vision_models as corrections
    from dlinfer.framework.lmdeploy_ext.layers import model_classes
    from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta_model
    from dlinfer.framework.lmdeploy_ext.layers.moe import experts_model, packed_experts_model
    from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters
    from dlinfer.framework.lmdeploy_ext.layers.sparse_attention import indexer_model
    from dlinfer.framework.lmdeploy_ext.running import selection
    from dlinfer.framework.lmdeploy_ext.sampling import drafts, logit_bias, penalties, steps, token_draws
    from dlinfer.framework.lmdeploy_ext.sampling import sparse_logit_writes as few_logits
    from dlinfer.framework.lmdeploy_ext.stepping import (
        chunk_turns,
        joined_forward,
        prompt_turns,
        step_thread,
    )
    from dlinfer.framework.lmdeploy_ext.stepping import last_token_rows as last_rows
    from dlinfer.framework.lmdeploy_ext.vision import (
        cogvlm,
        glm_4v,
        image_files,
        one_position,
        processors,
    )

    modules = (
        engine_config,
        refusals,
        cli,
        device_patches,
        ranks,
        experts_model,
        packed_experts_model,
        gated_delta_model,
        indexer_model,
        model_classes,
        selection,
        kv_memory,
        cache_blocks,
        chunk_turns,
        prompt_turns,
        joined_forward,
        last_rows,
        generation,
        adapter_checks,
        harmony,
        generation_options,
        http_errors,
        model_build,
        model_checks,
        model_config,
        prompts,
        unread_fields,
        rope_lengths,
        rope_parameters,
        scoring,
        serving,
        step_thread,
        text,
        logprobs,
        completions,
        marked_text,
        stop_sequences,
        left_streams,
        parser_names,
        rewards,
        token_draws,
        few_logits,
        drafts,
        grammars,
        min_new_tokens,
        logit_bias,
        penalties,
        required_calls,
        steps,
        weight_checks,
        loading,
        media,
        cogvlm,
        corrections,
        glm_4v,
        one_position,
        image_files,
        processors,
    )
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
