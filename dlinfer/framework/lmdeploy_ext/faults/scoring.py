"""``output_logits="all"`` and ``max_new_tokens=0``: right logits, and no harm to the requests that follow.

Four faults of LMDeploy that do not depend on the device; two came with 0.18. They are corrected for ours, since the
alternative is wrong tokens in silence.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Patch


def _step_postprocess(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _step_postprocess_with_output(
        self: Any, last_logits: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if activation.active() is not None and (kwargs.get("return_logits") or kwargs.get("return_ce_loss")):
            last_logits = last_logits.clone()  # sampling divides it by the temperature, in place
        return original(self, last_logits, logits, *args, **kwargs)

    return _step_postprocess_with_output


def _update_running_seqs(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def update_running_seqs(self: Any, running: list[Any], inputs: Any) -> None:
        from lmdeploy.pytorch.disagg.config import EngineRole

        if activation.active() is not None and inputs is not None and self.config.role != EngineRole.Prefill:
            chunk = self.long_context_chunker.enabled() and inputs.is_chunk
            # A prefill for the logprobs of its input samples nothing, and the model agent keeps none of its rows.
            if not chunk and inputs.logits_indices is None:
                self.running_seqs.extend(running)
                return
        original(self, running, inputs)

    return update_running_seqs


def _schedule(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def schedule(
        self: Any,
        *,
        waiting: list[Any],
        stopped: list[Any],
        num_ready: int,
        num_running: int,
        turn_policy: Any,
        prealloc_size: int = 0,
    ) -> list[Any]:
        if activation.active() is not None and waiting:
            first = min(waiting, key=lambda seq: seq.arrive_time)
            other = [seq for seq in waiting if _scores(seq) != _scores(first)]
            waiting = [seq for seq in waiting if _scores(seq) == _scores(first)]
            stopped = stopped + other  # whose blocks can be reclaimed as before
        return original(
            self,
            waiting=waiting,
            stopped=stopped,
            num_ready=num_ready,
            num_running=num_running,
            turn_policy=turn_policy,
            prealloc_size=prealloc_size,
        )

    return schedule


def _scores(seq: Any) -> bool:
    """Whether a sequence asks for the logprobs of its input, and so for no token."""
    return seq.logprob_start_pos >= 0


def _get_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_logits(self: Any) -> torch.Tensor | None:
        if activation.active() is None or self._data is None or self._torch_dtype is None:
            return original(self)
        words = self.get_real()  # int16 [tokens, vocabulary * words in a number]
        return torch.frombuffer(words, dtype=self._torch_dtype).view(words.shape[0], -1)

    return get_logits


PATCHES = (
    Patch(
        target="lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._step_postprocess_with_output",
        why="where every sequence has one row (a batch of one, prompts of one token), sampling scales the logits that "
        "are returned, in place, by the default temperature of 0.8",
        signature="(self, last_logits, logits, inputs, sampling_inputs, stopping_criteria, model_metas, "
        "need_broadcast_next, return_logits=False, return_ce_loss=False, seq_length=None, all_routed_experts=None, "
        "extra_inputs=None)",
        build=_step_postprocess,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.update_running_seqs",
        why="leaves out requests with max_new_tokens=0 while the model agent keeps their rows, so that the next batch "
        "decodes with its neighbours' rows",
        signature="(self, running, inputs)",
        build=_update_running_seqs,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.pytorch.paging.prefill_scheduler:_PrefillScheduler.schedule",
        why="puts requests for the logprobs of their input and requests for tokens into one prefill, which samples "
        "nothing: the others end with token 0 as their text, and the engine's loop with the next step",
        signature="(self, *, waiting, stopped, num_ready, num_running, turn_policy, prealloc_size=0)",
        build=_schedule,
        versions=FAULTY,
    ),
    Patch(
        target="lmdeploy.pytorch.messages:HistoryLogits.get_logits",
        why="takes float32 logits for 16-bit ones and fails in the engine's loop, which ends the engine",
        signature="(self)",
        build=_get_logits,
        versions=FAULTY,
    ),
)
