"""Lists all patches on LMDeploy, and applies each patch when the LMDeploy module that it changes is imported.

LMDeploy's modules copy functions from each other by ``from ... import``. A patch that is applied after such an import
would miss the copy, so patches are applied at import, before the user has chosen a device. If the engine then runs on
one of LMDeploy's own devices, each patch calls the original function.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.faults import byte_order_mark
from dlinfer.framework.patching import Patch, patches_of


def _records() -> list[Patch]:
    from dlinfer.framework.lmdeploy_ext import (
        adapters,
        checks,
        command_line,
        device,
        engine_config,
        ranks,
        stepping,
    )
    from dlinfer.framework.lmdeploy_ext.conversion import loading
    from dlinfer.framework.lmdeploy_ext.faults import answers, models, sampling, serving
    from dlinfer.framework.lmdeploy_ext.layers.compressed_attention import model as compressed_model
    from dlinfer.framework.lmdeploy_ext.layers.linear_attention import gated_delta_model
    from dlinfer.framework.lmdeploy_ext.layers.moe import experts_model, packed_experts_model
    from dlinfer.framework.lmdeploy_ext.layers.positions import rope_lengths, rope_parameters
    from dlinfer.framework.lmdeploy_ext.layers.sparse_attention import indexer_model
    from dlinfer.framework.lmdeploy_ext.ngram import method
    from dlinfer.framework.lmdeploy_ext.running import metrics
    from dlinfer.framework.lmdeploy_ext.sampling import logit_bias, sparse_logit_writes, token_draws
    from dlinfer.framework.lmdeploy_ext.vision import draft_embeddings, image_files, processors

    modules = [command_line, engine_config, loading, gated_delta_model, experts_model, packed_experts_model]
    modules += [rope_lengths, rope_parameters, indexer_model, logit_bias, sparse_logit_writes, token_draws]
    modules += [draft_embeddings, image_files, method, metrics, processors, compressed_model]
    for package in (adapters, checks, device, ranks, answers, models, sampling, serving, stepping):
        files = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        modules += [importlib.import_module(file.name) for file in files]
    return [patch for module in modules for patch in patches_of(module, "lmdeploy")]


def _changed() -> Iterable[tuple[Patch, str]]:
    from dlinfer.framework.lmdeploy_ext.contract import bodies

    patches = activation.patches()
    return bodies.changed(filter(patches.needs, patches.patches), patches.version())


activation.provide(_records, _changed)


def on_import(module: ModuleType | None) -> None:
    """Apply the patches to the loaded LMDeploy modules, and make ``module`` use the active device for "cuda".

    The import hook calls this after each import of an LMDeploy module. module: the module that was just imported; None
    if the adaptor itself was just imported.
    """
    activation.patches().apply_loaded()
    byte_order_mark.OF_TRANSFORMERS.apply_loaded()
    activation.tell_of_misfits()
    if activation.active() is not None and module is not None:
        from dlinfer.framework.lmdeploy_ext.device import view

        view.cover(module)
