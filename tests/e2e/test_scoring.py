"""Logits and logprobs of the input where LMDeploy 0.18 itself is wrong on every device, unless the adaptor corrects it.

Each test names the function that is to blame. The common case, several sequences in one unchunked prefill with
nothing after it, belongs to the matrix.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.cell_checks import check_logits
from tests.e2e.harness import NEW_TOKENS, EngineRun, Lab
from tests.e2e.sampling_oracle import log_softmax

pytestmark = [pytest.mark.full, pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2000)]

SEQUENCES = [list(range(10, 52)), list(range(100, 220))]
TOKENS = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
INPUT_LOGPROBS = {"max_new_tokens": 0, "logprobs": 1, "logprob_start_len": 0}
MIXED = [TOKENS, INPUT_LOGPROBS, INPUT_LOGPROBS, TOKENS, TOKENS, INPUT_LOGPROBS]


@pytest.fixture(scope="module")
def runs(lab: Lab) -> dict[str, EngineRun]:
    """What each engine answered; all of them share a process."""
    model = lab.model("qwen2")
    prompts = lab.prompts(model)
    long = prompts[1:] * 2  # a prompt of one token has no logprobs of its input
    logits = {"name": "logits", "kind": "teacher_forced", "sequences": SEQUENCES}
    after = {"name": "after", "kind": "call", "prompts": prompts, "gen": TOKENS}
    mixed = {"name": "mixed", "kind": "call", "prompts": long, "gen": MIXED}
    alone = {"name": "alone", "kind": "one_by_one", "prompts": prompts[1:], "gen": INPUT_LOGPROBS}
    chunked: dict[str, Any] = {"max_prefill_token_num": 32}
    starts: dict[str, tuple[Path, list[dict[str, Any]], dict[str, Any]]] = {
        "alone": (model, [{**logits, "sequences": SEQUENCES[:1]}], {}),
        "float32": (model, [logits], chunked),
        "bfloat16": (lab.model("qwen2", dtype="bfloat16"), [logits], chunked),
        "next": (model, [logits, after], {}),
        "logprobs": (
            model,
            [mixed, {**mixed, "name": "again"}, alone, after],
            {"logprobs_mode": "raw_logprobs"},
        ),
    }
    return dict(zip(starts, lab.engines(list(starts.values())), strict=True))


def hf_logits(lab: Lab, dtype: str) -> list[np.ndarray]:
    hf = lab.reference(lab.model("qwen2", dtype=dtype), score=SEQUENCES)
    return [hf[f"logits_{i}"] for i in range(len(SEQUENCES))]


def test_one_sequence_alone(lab: Lab, runs: dict[str, EngineRun]) -> None:
    """``ARModelAgentStrategy.slice_outputs`` returns a view for a batch of one; sampling then divides the last row of
    the logits by the default temperature, in place."""
    assert check_logits("logits", runs["alone"], hf_logits(lab, "float32"), "float32") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunked_prefill(lab: Lab, runs: dict[str, EngineRun], dtype: str) -> None:
    """``HistoryLogits`` collects the chunks as 16-bit numbers and cannot give 32-bit ones back: the engine's loop dies
    of it. In 16 bits the last row of each chunk is wrong, as in ``test_one_sequence_alone``."""
    assert check_logits("logits", runs[dtype], hf_logits(lab, dtype), dtype) == []


def test_the_next_request_is_unharmed(lab: Lab, runs: dict[str, EngineRun]) -> None:
    """``InputsMaker.update_running_seqs`` skips a request with max_new_tokens=0, ``ARStepInputs.merge_prefill`` does
    not: the next batch decodes with the rows of its neighbours."""
    model = lab.model("qwen2")
    prompts, run = lab.prompts(model), runs["next"]
    hf = lab.reference(model, prompts=prompts, max_new_tokens=NEW_TOKENS)
    assert run.tokens("after") == [hf[f"tokens_{i}"].tolist() for i in range(len(prompts))]


def test_input_logprobs_beside_requests_for_tokens(lab: Lab, runs: dict[str, EngineRun]) -> None:
    """``_PrefillScheduler.schedule`` puts both kinds into one prefill, which samples nothing: requests for tokens end
    with token 0, and the engine's loop with the next step."""
    model = lab.model("qwen2")
    prompts, run = lab.prompts(model), runs["logprobs"]
    ids = [lab.tokenizer(model).encode(prompt).ids for prompt in prompts]
    hf = lab.reference(model, prompts=prompts, max_new_tokens=NEW_TOKENS, score=ids)
    assert run.tokens("after") == [hf[f"tokens_{i}"].tolist() for i in range(len(prompts))]
    for name in ("mixed", "again", "alone"):
        for i, response in enumerate(run[name]):
            place = 1 + i % 3
            if name == "alone" or MIXED[i] is INPUT_LOGPROBS:
                rows = log_softmax(hf[f"logits_{place}"])
                expected = [rows[at][token] for at, token in enumerate(ids[place][1:])]
                got = [
                    dict(pairs)[token]
                    for pairs, token in zip(response["logprobs"], ids[place][1:], strict=True)
                ]
                np.testing.assert_allclose(got, expected, atol=2e-4, rtol=0)
            else:
                assert response["token_ids"] == hf[f"tokens_{place}"].tolist(), (name, i)
