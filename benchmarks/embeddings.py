"""dlinfer.embedding against sentence-transformers (torch, eager) and OpenVINO: texts of mixed lengths to vectors.

    python -m benchmarks.embeddings [--pairs 15] [--texts 64] [--kinds ...] [--layers 12]

The model has the shape of BERT-base and random weights. sentence-transformers sorts the texts by length, and pads
batches of 32. OpenVINO gets the same batches (``openvino``), or one text at a time without padding
(``openvino-single``). The ``-bf16`` kinds compute in bfloat16. Prints texts a second, median ratios with their 95 %
interval, and peak RSS. The last line is JSON. On a busy machine set OMP_NUM_THREADS=1 and read the CPU seconds, because
threads that wait for each other spin.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.arena import Entry, measure
from benchmarks.models import FOLDER
from benchmarks.timing import publish, ratio

KINDS = [
    "dlinfer",
    "sentence-transformers",
    "openvino",
    "openvino-single",
    "dlinfer-bf16",
    "sentence-transformers-bf16",
    "openvino-bf16",
]
WORDS = 20_000


def build(folder: Path, layers: int) -> Path:
    """Write a model with the shape of BERT-base that pools the mean and normalises, unless it is there."""
    if (folder / "modules.json").exists():
        return folder
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*special, *(f"w{n}" for n in range(WORDS))])}
    words = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    BertModel(BertConfig(num_hidden_layers=layers)).save_pretrained(folder)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=512, **names).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"embedding_dimension": 768, "pooling_mode": "mean", "include_prompt": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    model = build(FOLDER.with_name(f"bert-{args.layers}-layers"), args.layers)
    entries = [Entry(kind, kind, model, module="benchmarks.embedders") for kind in args.kinds]
    orders: list[dict[str, Any]] = [{"texts": args.texts}]
    _, (answers,) = measure(entries, orders, args.pairs)
    seconds, cpu = (
        {kind: [answer[name] for answer in answers[kind]] for kind in args.kinds}
        for name in ("seconds", "cpu")
    )
    rows = []
    for kind in args.kinds:
        ours = "dlinfer-bf16" if kind.endswith("bf16") else "dlinfer"
        peak = statistics.median(answer["rss"] for answer in answers[kind]) / 2**30
        rows.append(
            {
                "kind": kind,
                "texts/s": args.texts / statistics.median(seconds[kind]),
                "dlinfer is faster by": ratio(seconds[kind], seconds[ours]) if ours in seconds else "",
                "in CPU seconds": ratio(cpu[kind], cpu[ours]) if ours in seconds else "",
                "alike": min(answer["alike"] for answer in answers[kind]),
                "peak GiB": round(peak, 2),
            }
        )
    tokens = answers[args.kinds[0]][0]["tokens"]
    publish(f"embeddings of {args.texts} texts, {tokens} tokens, BERT with {args.layers} layers", rows)


if __name__ == "__main__":
    main()
