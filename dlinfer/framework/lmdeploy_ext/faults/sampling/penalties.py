"""Apply penalties and logits processors to each sequence by its own tokens, and end sequences that repeat themselves.

The penalties follow vLLM and OpenAI. The repetition penalty applies to tokens of the prompt and the answer: it divides
their positive logits and multiplies their negative logits. From the result we subtract ``frequency_penalty`` times the
token's count in the answer, and ``presence_penalty`` if the answer has the token.

LMDeploy penalises no token of the prompt, and ignores the two penalties of OpenAI's protocol. Whether it penalises the
newest token depends on other requests. If the sequences of a batch have different lengths, its logits processors (such
as ``bad_words``) read tokens with padding between them, but without the tokens of accepted drafts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlinfer.framework.lmdeploy_ext.device.activation import corrects
from dlinfer.framework.lmdeploy_ext.faults.sampling import drafts, texts
from dlinfer.framework.patching import Original

OPENAI = ("presence_penalty", "frequency_penalty")
"""The penalties of OpenAI's protocol, as names of attributes that a GenerationConfig or SamplingParam may have."""


def apply(scores: Tensor, rows: Sequence[texts.Row], temperature: Tensor | None) -> Tensor:
    """Penalise logits in each row of ``scores`` by the tokens of the row's sequence. Change ``scores``, and return it.

    scores: logits [B, V], already divided by the temperature. temperature: [B]; None means 1 for all rows. rows: the
    result of ``texts.of_rows``.
    """
    penalised = [row for row in rows if row[1].rules.penalises]
    if not penalised:
        return scores
    counted = [text.counts(drafted) for _, text, drafted in penalised]
    sizes = [len(tokens) for tokens, _ in counted]
    tokens = np.concatenate([tokens for tokens, _ in counted])
    counts = np.concatenate([counts for _, counts in counted])
    if len(tokens) == 0:
        return scores
    is_token = None
    if tokens.min() < 0 or tokens.max() >= scores.shape[1]:  # an image's ids may be beyond the vocabulary
        is_token = (tokens >= 0) & (tokens < scores.shape[1])

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values if is_token is None else values[is_token]).to(scores.device)

    def of_each(values: list[float]) -> np.ndarray:
        return np.repeat(np.array(values, np.float32), sizes)

    rules = [text.rules for _, text, _ in penalised]
    index = on_device(np.repeat([row for row, _, _ in penalised], sizes)), on_device(tokens)
    new = scores[index].float()
    if any(rule.repetition != 1.0 for rule in rules):
        factor = on_device(of_each([rule.repetition for rule in rules]))
        new = torch.where(new < 0, new * factor, new / factor)
    if any(rule.presence or rule.frequency for rule in rules):
        subtracted = of_each([rule.frequency for rule in rules]) * counts.astype(np.float32)
        subtracted += of_each([rule.presence for rule in rules]) * (counts > 0)
        by = on_device(subtracted)
        new -= by if temperature is None else by / temperature[index[0]].float()
    return scores.index_put_(index, new.to(scores.dtype))


def end_repeating(scores: Tensor, rows: Sequence[texts.Row], inputs: Any, window: int) -> Tensor:
    """Allow only the first stop word in rows whose sequence repeats itself. Change ``scores`` in place, and return it.

    scores: logits [B, V]. inputs: SamplingInputs of the B rows. window: how many of the last tokens to search for
    repetitions. A row without a stop word stays as it is, and so does a row that must not stop yet.
    """
    checked = [row for row in rows if row[1].rules.ngram_size > 0]
    if not checked or inputs.stop_words is None or inputs.stop_words.numel() == 0:
        return scores
    stop = inputs.stop_words[:, 0].tolist()
    waits = (inputs.num_ignore_eos > 0).tolist()
    for row, text, drafted in checked:
        if stop[row] >= 0 and not waits[row] and text.repeats(window, drafted):
            scores[row].fill_(-torch.inf)
            scores[row, stop[row]] = 0
    return scores


@corrects(
    "lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor.__call__",
    why="penalises by a list of tokens that lacks the newest one, unless another request's prefill came between. It "
    "treats the padding of an empty text as repeated n-grams, and passes logits processors a padded text",
)
async def _call(original: Original, self: Any, scores: Tensor) -> Any:
    inputs = self.sampling_inputs
    inputs.repetition_penalty, inputs.max_repetition_ngram_size = None, 0  # done below
    rows = list(texts.of_rows(inputs.session_ctx))
    if not rows:
        return await original(self, scores)
    drafts.count(inputs, rows)
    if any(inputs.logits_processors):
        inputs.all_ids = {
            row: torch.from_numpy(text.all_tokens(drafted)).to(scores.device)
            for row, text, drafted in rows
            if text.rules.has_processors
        }
    scores, logprobs = await original(self, scores)
    with torch.inference_mode():
        from lmdeploy.pytorch import envs

        apply(scores, rows, inputs.temperature)
        end_repeating(scores, rows, inputs, envs.repetition_window_size)
    return scores, logprobs


def _no_list(original: Original, pad_id: int, seqs: list[Any], sampling_inputs: Any) -> None:
    return None


PATCHES = tuple(
    corrects(
        f"lmdeploy.pytorch.strategies.ar.sampling:{name}",
        why="copies all tokens of a batch at each step, for penalties and processors that read dlinfer's texts of "
        "the rows instead",
    )(_no_list)
    for name in ("_gather_generated_ids", "_gather_all_ids")
)


@corrects(
    "lmdeploy.pytorch.messages:SamplingParam.from_gen_config",
    why="ignores presence_penalty and frequency_penalty",
    upstream="https://github.com/InternLM/lmdeploy/issues/704",
)
def _from_gen_config(original: Original, cls: type, gen_config: Any) -> Any:
    param = original(cls, gen_config)
    for name in OPENAI:
        setattr(param, name, getattr(gen_config, name, 0.0))
    return param


def take(config: Any, request: Any) -> None:
    """Copy the penalties of OpenAI's protocol from a request into its GenerationConfig, if they are not 0."""
    for name in OPENAI:
        penalty = getattr(request, name, None)
        if penalty:
            setattr(config, name, penalty)
