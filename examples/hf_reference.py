"""What Hugging Face transformers says: greedy tokens, logits and losses, for comparing another engine with.

Run it as a process of its own, without LMDeploy and without dlinfer's autoload, so that nothing under test
can reach into the reference::

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 python examples/hf_reference.py MODEL_FOLDER JOB.json OUT.npz

Further triples of model, job and output may follow. A job is a JSON object, every field optional:

``dtype``
    "auto" (the checkpoint's, the default), "float32", "bfloat16" or "float16".
``prompts`` and ``max_new_tokens``
    lists of token ids (or strings, tokenised without special tokens added) and one int. Each prompt runs
    alone, greedily, for exactly that many tokens: end-of-sequence tokens are never chosen, which is what
    LMDeploy's ``ignore_eos=True`` means too (``SamplingParam.from_gen_config`` makes them bad words).
``natural``
    true: also continue each prompt with end-of-sequence tokens allowed, stopping after one.
``score``
    lists of token ids that are fed whole (teacher-forced).
``score_continued``
    indices of prompts: each with its own greedy continuation is scored too, after the sequences of ``score``.
``hidden``
    true: also what the head reads of each scored sequence, for models whose head is another.

``OUT.npz`` holds ``dtype``, the model's, as a string; for prompt i: ``prompt_i`` int64[len], ``tokens_i``
int64[new] and ``gap_i`` float32[new], the distance between HF's two best scores at each step (a small one
means that another order of summation may legitimately choose the other token), and ``natural_i`` int64[<=
new]; for scored sequence i: ``logits_i`` float32[len, vocab] and ``loss_i``, the mean cross-entropy of token
t+1 given tokens up to t, which is what LMDeploy's ``Pipeline.get_ppl`` returns; and ``hidden_i`` float32[len, hidden].
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)


def end_tokens(model, tokenizer) -> list[int]:
    """Ids that end a text: those of the checkpoint's generation config and the tokenizer's own."""
    ids = model.generation_config.eos_token_id
    ends = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    return sorted(ends - {None})


@torch.inference_mode()
def forget(model) -> None:
    """Let a short text reset dynamic rotary frequencies, which stay those of the longest text until one comes."""
    model(torch.tensor([[0]]), use_cache=False)


def choose_frequencies(model) -> None:
    """Let Phi-3.5-MoE's longrope have the factors of the text's length, as its authors' code and transformers 4 do.

    transformers 5 chooses these frequencies, as it does for other models, and then passes over them for those of short
    texts (``PhimoeRotaryEmbedding.forward``). Other models, and texts below the original length, have nothing to mend.
    """
    rotary: Any = getattr(getattr(model, "model", None), "rotary_emb", None)
    if type(rotary).__name__ == "PhimoeRotaryEmbedding" and rotary.rope_type == "longrope":
        rotary.rope_init_fn = lambda config: (rotary.inv_freq, rotary.attention_scaling)


@torch.inference_mode()
def greedy(
    model, prompt: list[int], max_new_tokens: int, ends: list[int], ignore_eos: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy continuation of one prompt: tokens int64[new] and top-2 score gaps float32[new]."""
    # A fresh config: the checkpoint's own may carry penalties and samplers.
    plain = GenerationConfig(
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens if ignore_eos else 0,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    model.generation_config = plain
    forget(model)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)
    tokens = out.sequences[0, len(prompt) :]
    if ignore_eos and len(tokens) != max_new_tokens:
        raise RuntimeError(f"transformers stopped after {len(tokens)} of {max_new_tokens} tokens")
    best = torch.cat(out.scores).float().topk(2, dim=-1).values
    return tokens.numpy(), (best[:, 0] - best[:, 1]).numpy()


@torch.inference_mode()
def score(model, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Teacher-forced logits float32[len, vocab] and the mean cross-entropy loss of ids[1:]."""
    forget(model)
    logits = model(torch.tensor([ids])).logits[0].float()
    if len(ids) < 2:
        return logits.numpy(), np.asarray(np.nan)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return logits.numpy(), np.asarray(loss)


@torch.inference_mode()
def hidden(model, ids: list[int]) -> np.ndarray:
    """What the head reads, behind the last norm: float32[len, hidden]."""
    return model.model(torch.tensor([ids])).last_hidden_state[0].float().numpy()


def check_alone() -> None:
    """End the process where what is tested could reach into it."""
    polluted = [name for name in ("lmdeploy", "dlinfer") if name in sys.modules]
    if polluted:
        sys.exit(
            f"error: {', '.join(polluted)} lives in the oracle's process; set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )


def load(model_folder: Path, dtype: str) -> Any:
    """Load the checkpoint's own class, with its part for images if it has one."""
    has_images = hasattr(AutoConfig.from_pretrained(model_folder), "vision_config")
    auto_class = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    return auto_class.from_pretrained(model_folder, dtype=dtype).eval()


def run(model_folder: Path, job: dict) -> dict[str, np.ndarray]:
    """Answer a job (see the module's docstring) as the arrays of OUT.npz."""
    model = load(model_folder, job.get("dtype", "auto"))
    choose_frequencies(model)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ends = end_tokens(model, tokenizer)
    answer = {"dtype": np.array(str(model.dtype).removeprefix("torch."))}
    for i, prompt in enumerate(job.get("prompts", [])):
        ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        answer[f"prompt_{i}"] = np.asarray(ids)
        new = job["max_new_tokens"]
        answer[f"tokens_{i}"], answer[f"gap_{i}"] = greedy(model, ids, new, ends)
        if job.get("natural"):
            answer[f"natural_{i}"], _ = greedy(model, ids, new, ends, ignore_eos=False)
    continued = [[*answer[f"prompt_{i}"], *answer[f"tokens_{i}"]] for i in job.get("score_continued", [])]
    for i, ids in enumerate(job.get("score", []) + continued):
        answer[f"logits_{i}"], answer[f"loss_{i}"] = score(model, ids)
        if job.get("hidden"):
            answer[f"hidden_{i}"] = hidden(model, ids)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="MODEL JOB OUT")
    args = parser.parse_args()
    if len(args.runs) % 3:
        parser.error("give a model, a job and an output file, or several such triples")
    check_alone()
    for model, job, out in zip(*[iter(args.runs)] * 3, strict=True):
        answer = run(model, json.loads(job.read_text()))
        np.savez(out, **answer)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
