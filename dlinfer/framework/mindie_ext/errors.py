"""Errors of the MindIE adaptor's generator."""

from dlinfer.errors import DlinferError


class ModelConfigError(DlinferError, ValueError):
    """A generator's model_config has faults. The field ``faults`` lists (key, what is expected, what was given)."""

    message = "the model_config is not valid: {faults}."
    next_step = "correct these keys (docs/vendors/mindie_config.md lists all keys). Nothing was loaded."


class AdapterError(DlinferError, ValueError):
    """A LoRA adapter cannot be loaded, unloaded or used. Its folder or name is wrong, or no place is free."""

    message = "LoRA adapter {name!r}: {detail}."
    next_step = "{advice}"


class RankLostError(DlinferError, RuntimeError):
    """Another rank of a tensor parallel model ended, or did not join."""

    message = "rank {rank} of {world_size}: another rank was lost while {what}: {detail}."
    next_step = "restart all ranks, and send unanswered requests again."


class RankError(DlinferError, RuntimeError):
    """This process cannot join the other ranks.

    A variable is missing, or torch.distributed runs with another rank or size.
    """

    message = "rank {rank} of {world_size} cannot join: {detail}."
    next_step = "{advice}"


class GeneratorCallError(DlinferError, ValueError):
    """An argument of a generator's call contradicts the model, the KV pool or another argument."""

    message = "{call}: {argument}: expected {expected}, given {given}."
    next_step = "correct the argument and send the step again. Nothing was computed, and no sequence changed."


class SamplingError(DlinferError, ValueError):
    """A sampling parameter has an unsupported value, or the logits have an unsupported shape or dtype."""

    message = "sampling: {parameter}: expected {expected}, given {given}."
    next_step = "correct the parameter in the request and send the step again."


class SwapError(DlinferError, ValueError):
    """A swap of blocks between device and host names an unknown decision or block, or writes one block twice."""

    message = "the blocks {decisions} cannot be swapped: {detail}."
    next_step = (
        "pass rows of [0, host block, device block] or [1, device block, host block]. Nothing was moved."
    )


class PoolMissingError(DlinferError, RuntimeError):
    """A forward needs the KV pool, which was cleared or not yet allocated."""

    message = "{call} needs the KV pool, which is not allocated."
    next_step = "call warm_up() or update_cache_policy(kvcache_settings) first."
