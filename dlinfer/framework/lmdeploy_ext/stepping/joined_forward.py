"""Run a decoding step and the prefill step that follows it with one forward of the model.

A step of LMDeploy consists of a forward, logits, sampling and bookkeeping. Here the two steps still run one after the
other, but they share one forward, and logits where possible. The first step computes the rows of both steps, and the
second step takes its rows from that result.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable
from typing import Any

import torch.distributed
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.layers import block_diffusion
from dlinfer.framework.lmdeploy_ext.stepping import last_token_rows as last_rows
from dlinfer.framework.patching import Original, replaces

_NAME = "dlinfer_joined"
"""Attribute of a model agent: the _Joined of the two steps that share a forward; None at other times."""

Forward = Callable[..., Awaitable[dict[str, Any]]]
Step = Callable[[], Awaitable[None]]


async def following(agent: Any, seconds: float) -> dict[str, Any] | None:
    """Take the next step's arguments from the model agent's queue, as the agent's loop does.

    The result is None if no step comes within ``seconds``. With several ranks, the first rank decides whether the step
    came in time, and the other ranks follow its decision.
    """
    context = agent.dist_ctx
    if context.dist_config.world_size == 1:
        return await _next_step(agent, seconds)
    loop = asyncio.get_running_loop()
    came = torch.zeros(1, dtype=torch.int8)
    tell = functools.partial(torch.distributed.broadcast, came, src=0, group=context.cpu_group)
    if context.rank == 0:
        step = await _next_step(agent, seconds)
        came += step is not None
        await loop.run_in_executor(None, tell)
        return step
    await loop.run_in_executor(None, tell)
    return received(agent, await agent._in_que.get()) if came else None


async def _next_step(agent: Any, seconds: float) -> dict[str, Any] | None:
    try:
        # Before Python 3.12 wait_for swallows a cancellation that arrives together with an item.
        async with asyncio.timeout(seconds):
            step = await agent._in_que.get()
    except TimeoutError:
        return None
    return received(agent, step)


def received(agent: Any, step: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``step``, an item of the agent's queue.

    The agent keeps the host tensors of the step's host-to-device copies alive until the copies have ended.
    """
    agent._keep_h2d_transfer(step.pop("_h2d_transfer", None))
    return step


def can_join(agent: Any, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether two steps can share a forward.

    first: the arguments of a decoding step. second: the arguments of the step after it.
    """
    prompts = second.get("inputs")
    if prompts is None or prompts.is_decoding or prompts.is_dummy:
        return False
    if agent.spec_agent.is_enabled() or getattr(agent, "memdecode_agent", None) is not None:
        return False
    if block_diffusion.is_used(agent.model_config):  # its decoding steps have several rows of each sequence
        return False
    own = ("cache_inputs", "kv_connector_metadata", "return_routed_experts")
    if any(step.get(name) for step in (first, second) for name in own):
        return False
    return not (second.get("swap_in_map") or second.get("swap_out_map"))


async def joined(agent: Any, first: Step, second: Step, arguments: dict[str, Any]) -> None:
    """Run two steps with one forward. first: the decoding step. second: the prefill step.

    arguments: the arguments of ``second``.
    """
    expect(agent, arguments)
    try:
        await first()
        await second()
    finally:
        setattr(agent, _NAME, None)


def expect(agent: Any, second: dict[str, Any]) -> None:
    """Make the agent's next two forwards share one computation. The first decodes, the second prefills.

    second: the arguments of the second step.
    """
    prompts = second["inputs"]
    has_all_logits = bool(second.get("return_logits") or second.get("return_ce_loss"))
    one_row_each = last_rows.are_enough(prompts, has_all_logits=has_all_logits)
    setattr(agent, _NAME, _Joined(prompts, agent, one_row_each))


def is_joining(agent: Any) -> bool:
    """Return whether two steps of an agent share a forward now."""
    return getattr(agent, _NAME, None) is not None


class _Joined:
    """The state of a forward that a decoding step and a prefill step share.

    prompts: ModelInputs of the prefill step. The prefill step may still set their ``model_metas``.
    one_row_each: whether the prefill step needs only the logits of each prompt's last row.
    """

    def __init__(self, prompts: Any, agent: Any, one_row_each: bool) -> None:
        self._prompts, self._agent, self._one_row_each = prompts, agent, one_row_each
        self._second: dict[str, Any] | None = None
        self._second_logits: Tensor | None = None
        self._is_first = True

    async def forward(self, original: Forward, inputs: Any) -> dict[str, Any]:
        """Return the decoding step's output at the first call, and the prefill step's output at the second call.

        The first call runs ``original`` for both steps, and the second call returns the stored output. If the steps
        cannot share a forward, each call runs ``original`` for its own step.
        original: LMDeploy's forward, which takes ModelInputs. inputs: ModelInputs of the step that calls.
        """
        if not self._is_first:
            return await original(inputs) if self._second is None else self._second
        self._is_first = False
        if inputs.max_q_seqlen > 1:  # rows of drafts
            return await original(inputs)
        kept = self._kept_rows(inputs)
        if kept is not None and kept.numel() == 0:
            return await original(inputs)
        both = join(inputs if kept is None else _rows_of(inputs, kept), self._prompts)
        if both is None:
            return await original(inputs)
        with last_rows.giving(self._agent, self._one_row_each):
            output = await original(both)
        parts = split(output, inputs, self._prompts, kept)
        if parts is None:  # the next forward writes the same into the cache once more
            return await original(inputs)
        first, self._second = parts
        return first

    def logits(self, original: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return the decoding step's logits at the first call, and the prefill step's logits at the second call.

        original: a function from hidden states [1, rows, H] to logits [1, rows, V]. hidden: the hidden states of the
        step that calls.
        """
        if self._second_logits is not None:
            return self._second_logits
        if self._second is None or not self._one_row_each:
            return original(hidden)
        last = self._second["hidden_states"]
        if last.shape[1] != self._prompts.seq_length.numel():
            last = last[:, self._prompts.seq_length.cumsum(0) - 1]
        both = original(torch.cat([hidden, last], 1))
        self._second_logits = both[:, hidden.shape[1] :]
        return both[:, : hidden.shape[1]]

    def _kept_rows(self, decoding: Any) -> Tensor | None:
        """Return the indices of decoding rows whose sequence still owns its cache blocks; None if all do.

        decoding: ModelInputs of the decoding step. A sequence that ended while this step was prepared has lost its
        blocks, and a prompt may own them now. Then the ended sequence's row and the prompt would write to the same
        slots, in undefined order. The row can be left out, because its result is never read.
        """
        lost = torch.isin(self._slots(decoding), self._slots(self._prompts))
        return (~lost).nonzero()[:, 0] if lost.any() else None

    def _slots(self, inputs: Any) -> Tensor:
        from dlinfer.framework.lmdeploy_ext.layers.attention import cache_slots  # imports LMDeploy's layers

        config = self._agent.cache_config
        ends = inputs.seq_length + inputs.history_lengths
        if config.window_size > 0:
            ends = ends - inputs.num_ignored_history
        starts = torch.nn.functional.pad(inputs.seq_length.cumsum(0), (1, 0))
        size, tokens = config.kernel_block_size, inputs.input_ids.numel()
        return cache_slots(inputs.seq_length, ends, starts, inputs.block_offsets, size, tokens)


_OF_THE_STEP = frozenset(
    "logits_indices seq_logit_length is_chunk is_first_chunk is_last_chunk is_chunk_multimodal".split()
)
"""Fields of ModelInputs that do not affect a step's forward, because the step reads them afterwards."""


def join(decoding: Any, prompts: Any) -> Any | None:
    """Return one ModelInputs for both steps, decoding rows first; None if some input cannot be joined by rows.

    decoding: ModelInputs of [1, B] tokens of B sequences. prompts: ModelInputs of [1, N] tokens of other sequences.
    """
    both = {
        "input_ids": torch.cat([decoding.input_ids, prompts.input_ids], -1),
        "block_offsets": _padded(decoding.block_offsets, prompts.block_offsets),
        "is_decoding": False,
        "max_q_seqlen": max(decoding.max_q_seqlen, prompts.max_q_seqlen),
        "max_kv_seqlen": max(decoding.max_kv_seqlen, prompts.max_kv_seqlen),
        "sum_kv_seqlen": decoding.sum_kv_seqlen + prompts.sum_kv_seqlen,
    }
    for name in ("seq_length", "history_lengths", "num_ignored_history"):
        both[name] = torch.cat([getattr(decoding, name), getattr(prompts, name)])
    for name, dim in (("local_adapter_ids", 0), ("mrope_pos_ids", 1)):
        parts = [part for inputs in (decoding, prompts) if (part := getattr(inputs, name)) is not None]
        if len(parts) == 1:
            return None
        if parts:
            both[name] = torch.cat(parts, dim)
    metas = [meta for inputs in (decoding, prompts) for meta in inputs.model_metas or ()]
    if any(meta is not None for meta in metas):
        return None
    both["model_metas"] = [None] * both["seq_length"].numel()
    for field in dataclasses.fields(decoding):
        if field.name in both or field.name in _OF_THE_STEP:
            continue
        values = [getattr(inputs, field.name) for inputs in (decoding, prompts)]
        if any(value is not None and value is not False for value in values):
            return None
    return type(decoding)(**both)


def split(
    output: dict[str, Any], decoding: Any, prompts: Any, kept: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Split the output of a joint forward into the outputs of both steps; None if a field cannot be split by rows.

    decoding, prompts: ModelInputs of the two steps. kept: int64, the computed decoding rows; None if all were computed.
    Decoding rows that were not computed get hidden states of 0.
    """
    if output.keys() - {"hidden_states", "model_metas", "seq_length", "position_ids"}:
        return None
    if any(meta is not None for meta in output.get("model_metas") or ()):
        return None
    hidden, positions = output["hidden_states"], output["position_ids"]
    tokens = decoding.input_ids.numel()
    rows = tokens if kept is None else kept.numel()
    first, first_positions = hidden[:, :rows], positions[..., :rows]
    if kept is not None:
        first = hidden.new_zeros(hidden.shape[0], tokens, hidden.shape[2]).index_copy_(1, kept, first)
        zeros = positions.new_zeros(*positions.shape[:-1], tokens)
        first_positions = zeros.index_copy_(-1, kept, first_positions)
    return (
        _output(decoding, first, first_positions),
        _output(prompts, hidden[:, rows:], positions[..., rows:]),
    )


def _output(inputs: Any, hidden: Tensor, positions: Tensor) -> dict[str, Any]:
    lengths = {"seq_length": inputs.seq_length, "model_metas": None}
    return lengths | {"hidden_states": hidden, "position_ids": positions}


def _rows_of(decoding: Any, kept: Tensor) -> Any:
    from lmdeploy.pytorch.strategies.ar.model_inputs import index_select_model_inputs

    return index_select_model_inputs(decoding, kept)


def _padded(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate two block tables by rows. The narrower one is padded with block 0, which is never read."""
    width = max(first.shape[1], second.shape[1])
    pad = torch.nn.functional.pad
    return torch.cat([pad(table, (0, width - table.shape[1])) for table in (first, second)])


_AGENT = "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent"
_TWICE = "computes decoding and prompts separately, and so reads the weights twice"


@replaces(f"{_AGENT}.async_forward", why=_TWICE, essential=False)
async def _async_forward(
    original: Original, self: Any, inputs: Any, cache_inputs: Any = None
) -> dict[str, Any]:
    shared: _Joined | None = getattr(self, _NAME, None)
    if shared is None:
        return await original(self, inputs, cache_inputs=cache_inputs)
    return await shared.forward(functools.partial(original, self), inputs)


@replaces(f"{_AGENT}.get_logits", why=_TWICE, essential=False)
def _get_logits(original: Original, self: Any, hidden_states: Tensor) -> Tensor:
    shared: _Joined | None = getattr(self, _NAME, None)
    if shared is None:
        return original(self, hidden_states)
    return shared.logits(functools.partial(original, self), hidden_states)
