"""Train a Llama of a million weights on texts that CPython ships, and save it as a Hugging Face folder.

The model reads the docstrings of the standard library, which are also written to OUT/docstrings.txt. Python's help
texts, ``pydoc_data.topics``, are held out; ``dlinfer quantise --loss`` reads them. With ``--zen`` it learns the Zen of
Python by heart instead, in float32. The same Python, packages, kind of CPU and number of threads give the same weights.
"""

import argparse
import ast
import codecs
import importlib
import io
import math
import sysconfig
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
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
    tie_word_embeddings=True,
)
BATCH, LENGTH = 8, 128
RATE, WARM_UP = 3e-3, 50
STEPS, ZEN_STEPS = 2000, 100


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


def zen_of_python() -> str:
    """Return the text that ``import this`` prints."""
    with redirect_stdout(io.StringIO()):
        this = importlib.import_module("this")
    return codecs.decode(this.s, "rot13")


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


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, text: str = "") -> None:
    """Write the folder ``out``, whole or not at all. text: is written beside the model, unless it is empty."""
    new = out.with_name(f"{out.name}.new")
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    if text:
        (new / "docstrings.txt").write_text(text, encoding="utf-8")
    new.rename(out)


def learn_zen(out: Path) -> None:
    text = zen_of_python()
    tokenizer = tokenizer_of([text])
    tokens = tokenizer(text).input_ids
    save(train(torch.tensor(tokens), ZEN_STEPS), tokenizer, out)
    print(f"{out}: a Llama that knows the Zen of Python, {len(tokens)} tokens, by heart")


def learn_docstrings(out: Path, steps: int) -> None:
    texts = list(docstrings())
    tokenizer = tokenizer_of(texts)
    end = tokenizer.eos_token_id
    tokens = [token for ids in tokenizer(texts).input_ids for token in (*ids, end)]
    model = train(torch.tensor(tokens), steps)
    pages = "\n".join(topics[name] for name in sorted(topics))
    loss = loss_of(model, torch.tensor(tokenizer(pages, verbose=False).input_ids[:65536]))
    save(model.bfloat16(), tokenizer, out, "\n".join(texts))
    print(f"{out}: held-out text has a loss of {loss:.3f}, a perplexity of {math.exp(loss):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.trained_model", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write, which must not exist")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--steps", type=int, default=STEPS, help="batches (default %(default)s)")
    choice.add_argument("--zen", action="store_true", help="learn the Zen of Python by heart, in seconds")
    args = parser.parse_args()
    if args.out.exists():
        parser.exit(2, f"error: {args.out} exists; remove it, or choose another folder\n")
    if args.zen:
        learn_zen(args.out)
    else:
        learn_docstrings(args.out, args.steps)
