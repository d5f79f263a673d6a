"""Train a Llama of 1.3 million weights from the texts that every CPython ships, and save it as a Hugging Face folder.

It reads the docstrings of the standard library. ``pydoc_data.topics`` is held out, and ``dlinfer quantise --loss``
reads it. The same Python, packages, machine and number of threads give the same weights.
"""

import argparse
import ast
import math
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|end|>"
NOT_READ = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
BATCH, LENGTH = 16, 128
RATE, WARM_UP = 3e-3, 50


def docstrings() -> Iterator[str]:
    """Yield the docstrings of the standard library, each once, in the order of file names."""
    library, seen = Path(sysconfig.get_path("stdlib")), set[str]()
    for file in sorted(library.rglob("*.py")):
        if NOT_READ & set(file.relative_to(library).parts):
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and text not in seen:
                    seen.add(text)
                    yield text


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on ``texts``."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, CONFIG.vocab_size, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=END)


def rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine."""
    return RATE * min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def train(tokens: torch.Tensor, steps: int) -> LlamaForCausalLM:
    """Train a model on ``tokens``, one long text, for ``steps`` batches."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    begun, mean = time.perf_counter(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        batch = tokens[starts + torch.arange(LENGTH)]
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.item() if not step else 0.95 * mean + 0.05 * loss.item()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {mean:.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Return the mean loss of a token of ``tokens``, in nats."""
    windows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return float(torch.stack([model(part, labels=part).loss for part in windows.split(64)]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.trained_model", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    if args.out.exists():
        parser.exit(2, f"error: {args.out} exists; remove it, or choose another folder\n")
    texts = list(docstrings())
    tokenizer = tokenizer_of(texts)
    encoded = tokenizer(texts, add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    model = train(torch.tensor([token for text in encoded for token in (*text, end)]), args.steps)
    pages = "\n".join(topics[name] for name in sorted(topics))
    held_out = torch.tensor(tokenizer(pages, verbose=False).input_ids)
    loss = loss_of(model, held_out[:65536])
    print(f"held-out text: loss {loss:.3f}, perplexity {math.exp(loss):.2f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    temp = Path(tempfile.mkdtemp(prefix=f".{args.out.name}-", dir=args.out.parent))
    try:
        model.to(torch.bfloat16).save_pretrained(temp)
        tokenizer.save_pretrained(temp)
        temp.chmod(0o755)
        os.rename(temp, args.out)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
