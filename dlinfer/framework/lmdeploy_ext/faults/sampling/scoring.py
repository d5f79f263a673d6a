"""``output_logits="all"`` and ``max_new_tokens=0``: right logits, and no harm to the requests that follow.

Four faults of LMDeploy that do not depend on the device; two came with 0.18. They are corrected for ours, since the
alternative is wrong tokens in silence.
"""

from typing import Any

import torch

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.versions import FAULTY
from dlinfer.framework.patching import Original, replaces


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._step_postprocess_with_output",
    why="where every sequence has one row (a batch of one, prompts of one token), sampling scales the logits that "
    "are returned, in place, by the default temperature of 0.8",
    when=activation.is_on,
    signature="(self, last_logits, logits, inputs, sampling_inputs, stopping_criteria, model_metas, "
    "need_broadcast_next, return_logits=False, return_ce_loss=False, seq_length=None, all_routed_experts=None, "
    "extra_inputs=None)",
    versions=FAULTY,
)
def _step_postprocess(
    original: Original, self: Any, last_logits: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if kwargs.get("return_logits") or kwargs.get("return_ce_loss"):
        last_logits = last_logits.clone()  # sampling divides it by the temperature, in place
    return original(self, last_logits, logits, *args, **kwargs)


@replaces(
    "lmdeploy.pytorch.engine.inputs_maker:InputsMakerAsync.update_running_seqs",
    why="leaves out requests with max_new_tokens=0 while the model agent keeps their rows, so that the next batch "
    "decodes with its neighbours' rows",
    when=activation.is_on,
    versions=FAULTY,
)
def _update_running_seqs(original: Original, self: Any, running: list[Any], inputs: Any) -> None:
    from lmdeploy.pytorch.disagg.config import EngineRole

    if inputs is not None and self.config.role != EngineRole.Prefill:
        chunk = self.long_context_chunker.enabled() and inputs.is_chunk
        # A prefill for the logprobs of its input samples nothing, and the model agent keeps none of its rows.
        if not chunk and inputs.logits_indices is None:
            self.running_seqs.extend(running)
            return
    original(self, running, inputs)


@replaces(
    "lmdeploy.pytorch.paging.prefill_scheduler:_PrefillScheduler.schedule",
    why="puts requests for the logprobs of their input and requests for tokens into one prefill, which samples "
    "nothing: the others end with token 0 as their text, and the engine's loop with the next step",
    when=activation.is_on,
    versions=FAULTY,
)
def _schedule(
    original: Original,
    self: Any,
    *,
    waiting: list[Any],
    stopped: list[Any],
    num_ready: int,
    num_running: int,
    turn_policy: Any,
    prealloc_size: int = 0,
) -> list[Any]:
    if waiting:
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


def _scores(seq: Any) -> bool:
    """Whether a sequence asks for the logprobs of its input, and so for no token."""
    return seq.logprob_start_pos >= 0


@replaces(
    "lmdeploy.pytorch.messages:HistoryLogits.get_logits",
    why="takes float32 logits for 16-bit ones and fails in the engine's loop, which ends the engine",
    when=activation.is_on,
    versions=FAULTY,
)
def _get_logits(original: Original, self: Any) -> torch.Tensor | None:
    if self._data is None or self._torch_dtype is None:
        return original(self)
    words = self.get_real()  # int16 [tokens, vocabulary * words in a number]
    return torch.frombuffer(words, dtype=self._torch_dtype).view(words.shape[0], -1)
