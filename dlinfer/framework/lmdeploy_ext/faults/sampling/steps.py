"""Advance the stored tokens and the grammar of a sequence only by tokens that reach the client.

LMDeploy draws a token after every chunk of a prompt and advances the request's grammar by it. But only the token after
the last chunk belongs to the answer. A preemption drops the newest token, and the next prefill draws it again. LMDeploy
does not remove the dropped token from the grammar's state.
"""

from typing import Any

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.sampling.texts import START, Start, Texts
from dlinfer.framework.patching import Original

_NAME = "dlinfer_texts"  # the attribute of an agent that holds its Texts


def texts_of(agent: Any) -> Texts:
    """Return the Texts of a model agent, which the first call creates."""
    return vars(agent).setdefault(_NAME, Texts())


def _forget_ended(agent: Any, sampling_inputs: Any) -> None:
    """Forget the texts and grammars of the sessions that ended before a step. sampling_inputs: those of the step."""
    ended = sampling_inputs.session_to_cleanup or ()
    texts_of(agent).forget(ended)
    if agent.guided_decoding_manager is not None:
        for session in ended:
            agent.guided_decoding_manager.remove_processor(session)


def forget_before_scoring(agent: Any, step: dict[str, Any]) -> None:
    """Forget the sessions that ended before a step that only scores a prompt.

    Other steps do so when they sample. But the list of ended sessions comes with one step only, and a step that scores
    a prompt does not sample. step: the arguments of the model agent's step.
    """
    inputs, sampling_inputs = step.get("inputs"), step.get("sampling_inputs")
    if sampling_inputs is not None and agent._is_prefill_input_logprobs(inputs):
        _forget_ended(agent, sampling_inputs)


def _is_unfinished(inputs: Any) -> bool:
    """Return whether ``inputs``, a ModelInputs, is a chunk of a prompt other than the last chunk."""
    return inputs.is_chunk and not inputs.is_last_chunk


@corrects(
    "lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._build_payload",
    why="makes a step's inputs while the previous step computes, so their lists of generated tokens lack the newest "
    "one; only a prefill's lists are complete",
)
def _build_payload(original: Original, self: Any) -> dict[str, Any]:
    payload = original(self)
    inputs = payload["inputs"]
    if inputs is None or inputs.is_decoding or _is_unfinished(inputs):
        return payload
    contexts = payload["sampling_inputs"].session_ctx
    is_searched = getattr(self.maker.engine_strategy, "searches_texts", False)
    for seq, context in zip(payload["running"], contexts, strict=True):
        context[START] = Start.of(seq, has_drafts=self.maker.spec_decoding, is_searched=is_searched)
    return payload


def _restart_grammar(manager: Any, inputs: Any, row: int, start: Start) -> None:
    """Reset the grammar matcher of a row, if it has one, and feed it the tokens that the sequence has generated so far.

    inputs: SamplingInputs. start: the sequence's tokens at its prefill.
    """
    style = inputs.response_formats[row]
    if not isinstance(style, dict) or style.get("type", "text") == "text":
        return
    context = inputs.session_ctx[row]
    matcher = manager.get_processor(context["session_id"], context["seq_id"], style)
    matcher.reset()
    for token in start.generated.tolist():
        manager.accept_token(matcher, token)


@corrects(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.async_sampling_logits",
    why="draws a token after each unfinished chunk and feeds it to the request's grammar, and keeps a token in the "
    "grammar that a preemption dropped. Such answers end in 'stop' and do not follow their schema",
)
async def _async_sampling_logits(
    original: Original, self: Any, logits: Any, inputs: Any, extra_inputs: Any, sampling_inputs: Any
) -> Any:
    if inputs.is_dummy:
        return await original(self, logits, inputs, extra_inputs, sampling_inputs)
    has_drafts = self.spec_agent.is_enabled()
    drafts = getattr(extra_inputs, "output_draft_token_ids", None) if inputs.is_decoding else None
    drafted = None if drafts is None else drafts.tolist()
    texts, manager = texts_of(self), self.guided_decoding_manager
    _forget_ended(self, sampling_inputs)
    starts = texts.begin(sampling_inputs, drafted)
    if manager is not None:
        for row, start in starts:
            _restart_grammar(manager, sampling_inputs, row, start)
    is_diffusion = hasattr(extra_inputs, "dllm_mask")  # LMDeploy then counts a chunk's blocks as cached
    # With drafts LMDeploy draws nothing here.
    if _is_unfinished(inputs) and not has_drafts and not is_diffusion:
        nothing = inputs.seq_length.new_zeros(inputs.seq_length.numel())
        return nothing, None, nothing, extra_inputs
    drawn = await original(self, logits, inputs, extra_inputs, sampling_inputs)
    if not _is_unfinished(inputs):
        texts.add(sampling_inputs, drawn[2])
    return drawn
