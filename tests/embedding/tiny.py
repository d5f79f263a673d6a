"""Folders of tiny models with random weights, as sentence-transformers and transformers publish them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "What is the capital of France?",
    "Paris is the capital and largest city of France.",
    "Berlin had a population of 3,520,031 in 2019.",
    "",
    "naïve Zürich — 東京タワー 🗼 и Москва",
    "a",
    "The quick brown fox jumps over the lazy dog, again and again. " * 6,
    "def f(x):\n\treturn x ** 2  # a comment",
]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
VOCABULARY = 600
QWEN_TEMPLATE = (
    "{% set given = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first %}"
    "<|im_start|>user\n<Instruct>: {{ given or 'judge' }}\n"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
    "<|im_end|>\n<|im_start|>assistant\n"
)


def tokenizer(kind: str, limit: int = 128) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens of a family: bert, roberta or qwen."""
    names: dict[str, dict[str, Any]] = {
        "bert": {
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        },
        "roberta": {
            "bos_token": "<s>",
            "pad_token": "<pad>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "cls_token": "<s>",
            "sep_token": "</s>",
        },
        "qwen": {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    }
    special = list(dict.fromkeys(names[kind].values())) + (["<|im_start|>"] if kind == "qwen" else [])
    model: Any
    if kind == "bert":
        model = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special)
    else:
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    model.train_from_iterator([*TEXTS, *["yes", "no"] * 9], trainer)
    ids = {token: model.token_to_id(token) for token in special}
    single, pair = {
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
        "qwen": ("$A <|endoftext|>", "$A $B <|endoftext|>"),
    }[kind]
    model.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=list(ids.items())
    )
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if kind == "bert" else [])
    return PreTrainedTokenizerFast(
        tokenizer_object=model, model_max_length=limit, model_input_names=inputs, **names[kind]
    )


# Family -> (the kind of its tokenizer, the prefix of its classes, what its configuration adds to SIZES).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "Bert", {"max_position_embeddings": 160, "pad_token_id": 0}),
    "xlm_roberta": ("roberta", "XLMRoberta", {"max_position_embeddings": 130, "pad_token_id": 1}),
    "modernbert": (
        "bert",
        "ModernBert",
        {
            "local_attention": 16,
            "global_attn_every_n_layers": 2,
            "pad_token_id": 0,
            "max_position_embeddings": 512,
        },
    ),
    "gte": ("roberta", "Gte", {"pad_token_id": 1, "max_position_embeddings": 512}),
    "nomic_bert": ("bert", "NomicBert", {"pad_token_id": 0, "max_position_embeddings": 512}),
    "distilbert": (
        "bert",
        "DistilBert",
        {
            "dim": 64,
            "hidden_dim": 96,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 160,
            "pad_token_id": 0,
        },
    ),
    "electra": ("bert", "Electra", {"embedding_size": 32, "max_position_embeddings": 160, "pad_token_id": 0}),
    "eurobert": (
        "bert",
        "EuroBert",
        {"num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 512, "bos_token_id": 2},
    ),
    "qwen3": (
        "qwen",
        "Qwen3",
        {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 512},
    ),
}


def build(folder: Path, family: str, head: str = "Model", limit: int = 128, **config: Any) -> Path:
    """Write a model of a family as transformers does. head: the end of its class's name."""
    kind, prefix, more = FAMILIES[family]
    sizes = {"vocab_size": VOCABULARY} | SIZES | more | config
    settings = getattr(transformers, f"{prefix}Config")(**sizes)
    model = getattr(transformers, f"{prefix}{head}")(settings).eval()
    with torch.no_grad():  # biases and norms are trained too
        for _name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer(kind, limit).save_pretrained(folder)
    return folder


def write(folder: Path, name: str, data: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(data))


def sentence_files(
    folder: Path,
    *pooling: str,
    normalize: bool = True,
    old: bool = True,
    prompts: Any = None,
    **tokenising: Any,
) -> Path:
    """Add the files of sentence-transformers. old: in the format of version 2, else in that of version 5."""
    where = "sentence_transformers.models"
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": "" if kind == "Transformer" else f"{at}_{kind}",
            "type": f"{where}.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    write(folder, "modules.json", modules)
    names = {
        "mean": "mean_tokens",
        "cls": "cls_token",
        "max": "max_tokens",
        "weightedmean": "weightedmean_tokens",
    }
    size = json.loads((folder / "config.json").read_text()).get("hidden_size", 64)
    written: dict[str, Any] = {"word_embedding_dimension": size}
    if old:
        written |= {f"pooling_mode_{names.get(one, one)}": True for one in pooling}
    else:
        written = {"embedding_dimension": size, "pooling_mode": list(pooling), "include_prompt": True}
    write(folder, "1_Pooling/config.json", written | tokenising.pop("pooling_config", {}))
    write(folder, "sentence_bert_config.json", {"do_lower_case": False} | tokenising)
    write(folder, "config_sentence_transformers.json", prompts or {})
    return folder


def logit_score_files(folder: Path, message: bool = True) -> Path:
    """Add the files of a reranker that answers with a token, through its chat template."""
    modules = [
        {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.base.modules.transformer.Transformer",
        },
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    write(folder, "modules.json", modules)
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    answers = [words.convert_tokens_to_ids(word) for word in ("yes", "no")]
    write(folder, "1_LogitScore/config.json", {"true_token_id": answers[0], "false_token_id": answers[1]})
    way = {"method": "forward", "method_output_name": "logits"}
    modalities = {"text": way} | ({"message": way | {"format": "flat"}} if message else {})
    tokenising = {"transformer_task": "text-generation", "modality_config": modalities}
    write(folder, "sentence_bert_config.json", tokenising | {"module_output_name": "causal_logits"})
    prompts = {"prompts": {"search": "find passages"}, "default_prompt_name": "search"}
    general = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write(folder, "config_sentence_transformers.json", general | prompts)
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    return folder
