"""Score every text that a reward model can read, in ``/pooling`` and ``Pipeline.get_reward_score``.

LMDeploy 0.18 answers HTTP status 500 for a text of one token. It gives the same status without a reason for an empty
text, for ids outside the vocabulary and for a text that is too long, because its engine fails.
"""

from collections.abc import Sequence
from typing import Any

from dlinfer.errors import GenerationOptionError
from dlinfer.framework.lmdeploy_ext.checks.request.prompts import cache_refusal, refusal
from dlinfer.framework.lmdeploy_ext.device.activation import corrects, refuse
from dlinfer.framework.patching import Original

_MODELS = ("InternLM2ForRewardModel", "Qwen2ForRewardModel")


@corrects(
    "lmdeploy.serve.core.async_engine:AsyncEngine.async_get_reward_score",
    why="fails on one token and on inputs that the engine refuses, so /pooling answers with HTTP status 500, as it "
    "does for a model without rewards",
    essential=False,
)
async def _reward_score(original: Original, self: Any, input_ids: Sequence[Any]) -> Any:
    if self.arch not in _MODELS:
        raise refuse(f"a reward score of {self.arch}", f"use a model of class {' or '.join(_MODELS)}")
    texts = [input_ids] if input_ids and isinstance(input_ids[0], int) else list(input_ids)
    for ids in texts:
        _check(self, ids)
    logits = await self.async_get_logits(input_ids=texts)
    return [rows.reshape(-1)[-1].item() for rows in logits]


def _check(async_engine: Any, ids: Any) -> None:
    """Raise GenerationOptionError if the model cannot score ``ids``, the token ids of one text."""
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise GenerationOptionError(
            field="input", given=repr(ids)[:80], expected="token ids, or lists of them"
        )
    vocab_size = getattr(async_engine.hf_cfg.get_text_config(), "vocab_size", None)
    reason = refusal(ids, vocab_size)
    if reason is None and len(ids) > async_engine.session_len:
        reason = f"It has {len(ids)} tokens, more than session_len={async_engine.session_len}."
    reason = reason or cache_refusal(len(ids), async_engine)
    if reason is not None:
        raise GenerationOptionError(
            field="input", given=repr(ids)[:80], expected=f"a text that the model can score. {reason}"
        )


@corrects(
    "lmdeploy.pipeline:Pipeline.get_reward_score",
    why="fails on one token, and gives no reason for inputs that the engine refuses",
    essential=False,
)
def _pipeline_score(original: Original, self: Any, input_ids: list[Any]) -> list[float]:
    return self._run(coro=self.async_engine.async_get_reward_score(input_ids)).result()
