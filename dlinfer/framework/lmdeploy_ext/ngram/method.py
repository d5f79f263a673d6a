"""Patches LMDeploy for ``SpeculativeConfig(method="ngram")``, which it does not know.

Draft tokens come from the text of each sequence, so no draft model is loaded and no second cache is allocated.
"""

from typing import Any

from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.lmdeploy_ext.stepping import joined_forward
from dlinfer.framework.patching import Original, replaces

METHOD = "ngram"
FEATURE = "speculative decoding by n-grams"
_UNKNOWN = "knows only draft models"


def is_used(specdecode_config: Any) -> bool:
    """Return whether LMDeploy's SpecDecodeConfig, which may be None, has our method."""
    return specdecode_config is not None and specdecode_config.method == METHOD


def config(num_speculative_tokens: int, dist_config: Any) -> Any:
    """Return a SpecDecodeConfig without a model and a cache."""
    from lmdeploy.pytorch.config import SpecDecodeConfig

    return SpecDecodeConfig(
        model="", method=METHOD, num_speculative_tokens=num_speculative_tokens, dist_config=dist_config
    )


@replaces(
    "lmdeploy.pytorch.strategies:build_strategy_factory",
    why=_UNKNOWN,
    when=activation.is_on,
    for_feature=FEATURE,
)
def _strategies(
    original: Original, model_config: Any, misc_config: Any, specdecode_config: Any = None
) -> Any:
    if not is_used(specdecode_config):
        return original(model_config, misc_config, specdecode_config)
    from dlinfer.framework.lmdeploy_ext.ngram.agent import StrategyFactory

    return StrategyFactory(model_config, specdecode_config)


@replaces(
    "lmdeploy.pytorch.spec_decode:build_spec_agent", why=_UNKNOWN, when=activation.is_on, for_feature=FEATURE
)
def _agent(
    original: Original,
    specdecode_config: Any,
    backend_config: Any,
    dist_ctx: Any,
    inputs_strategy: Any,
    agent_strategy: Any,
    misc_config: Any,
    device: str = "cuda",
    guided_decoding_manager: Any = None,
) -> Any:
    own = (inputs_strategy, agent_strategy, misc_config)
    if not is_used(specdecode_config):
        context = (specdecode_config, backend_config, dist_ctx)
        return original(*context, *own, device, guided_decoding_manager)
    from dlinfer.framework.lmdeploy_ext.ngram.agent import NgramAgent

    return NgramAgent(
        specdecode_config,
        backend_config,
        *own,
        dist_ctx,
        device,
        guided_decoding_manager=guided_decoding_manager,
    )


def _looks_up(maker: Any) -> bool:
    """Return whether an engine has our method. maker: its InputsMaker."""
    return getattr(maker.engine_strategy, "searches_texts", False)


def _of(agent: Any) -> Any:
    """Return the NgramAgent of a model agent; None if it has none."""
    return agent.spec_agent if agent.spec_agent.method == METHOD else None


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent._async_model_forward",
    why="computes a row for each draft that a sequence may have, though it may have none",
    when=activation.is_on,
    for_feature=FEATURE,
)
async def _async_model_forward(
    original: Original, self: Any, inputs: Any, return_logits: bool, cache_inputs: Any = None
) -> dict[str, Any]:
    drafts = _of(self)
    if drafts is not None and inputs.is_decoding:
        inputs = drafts.present_rows(inputs, is_timed=not joined_forward.is_joining(self))
        return_logits = return_logits or inputs.max_q_seqlen > 1
    return await original(self, inputs, return_logits, cache_inputs)


@replaces(
    "lmdeploy.pytorch.engine.model_agent.agent:BaseModelAgent.async_sampling_logits",
    why="verifies as many drafts for each sequence",
    when=activation.is_on,
    for_feature=FEATURE,
)
async def _async_sampling_logits(
    original: Original, self: Any, logits: Tensor, inputs: Any, extra_inputs: Any, sampling_inputs: Any
) -> Any:
    drafts = _of(self)
    if drafts is None:
        return await original(self, logits, inputs, extra_inputs, sampling_inputs)
    return await drafts.draw(logits, inputs, extra_inputs, sampling_inputs)


@replaces(
    "lmdeploy.pytorch.engine.inputs_maker:_ForwardInputsTask._need_logits",
    why="asks for the logits of all tokens of a prompt, which a draft model may read",
    when=activation.is_on,
    for_feature=FEATURE,
)
def _need_logits(original: Original, self: Any) -> bool:
    if not _looks_up(self.maker):
        return original(self)
    return any(seq.return_logits for seq in self.result.running)


@replaces(
    "lmdeploy.pytorch.engine.engine_loop:EngineLoop._make_infer_outputs",
    why="tells the metrics that each step of a sequence had as many drafts as it may have",
    when=activation.is_on,
    essential=False,
)
def _outputs(
    original: Original, self: Any, batched_outputs: Any, running: Any, model_inputs: Any, delta: Any
) -> dict[int, Any]:
    arguments = (batched_outputs, running, model_inputs, delta)
    if not (self.config.enable_metrics and _looks_up(self.inputs_maker)):
        return original(self, *arguments)
    # Behind the tokens of a sequence are the drafts that this step has verified.
    tails = {seq.session_id: seq.history_cache[seq.num_valid_ids :] for seq in running}
    drafted = {session: int((tail >= 0).sum()) for session, tail in tails.items()}
    outputs = original(self, *arguments)
    for session, output in outputs.items():
        info = output.req_metrics.spec_info
        if info is not None:
            count = drafted[session]
            output.req_metrics.spec_info = info | {"num_draft_tokens": count} if count else None
    return outputs


@replaces(
    "lmdeploy.cli.utils:ArgumentHelper.add_spec_group",
    why="allows only methods with a draft model for --speculative-algorithm",
    essential=False,
)
def _options(original: Original, parser: Any) -> Any:
    group = original(parser)
    for action in parser._actions:
        if action.dest == "speculative_algorithm" and METHOD not in action.choices:
            action.choices = [*action.choices, METHOD]
    return group
