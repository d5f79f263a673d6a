"""A byte-level BPE tokenizer, trained on the spot on invented words, with a ChatML-style chat template."""

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from .families import BOS, EOS, VOCAB_SIZE

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ENGLISH = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, please introduce yourself in one short paragraph",
    "large language models serve many users from one cache of keys and values",
    "what is the capital of the smallest country, and how far is it from here?",
    '{"name": "ada", "age": 36, "tags": ["engine", "notes"], "alive": false}',
]


def _corpus() -> list[str]:
    """English sentences, often enough to become tokens, and invented words that fill the vocabulary."""
    rng = random.Random(0)
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(600)]
    invented = [" ".join(rng.choices(words, k=12)) for _ in range(1000)]
    return ENGLISH * 200 + invented


def train(
    extra: list[str] | dict[str, str] | None = None, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Train the tokenizer: ``VOCAB_SIZE`` entries, the special tokens first, no network.

    extra: special tokens with the ids that follow; a processor may look for them by the names of a dict.
    """
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_corpus(), trainer)
    if bpe.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus yields {bpe.get_vocab_size()} tokens, expected {VOCAB_SIZE}")
    named: list[str] | dict[str, str] = SPECIAL[3:]
    if extra is not None:
        bpe.add_special_tokens(list(extra.values() if isinstance(extra, dict) else extra))
        named = extra if isinstance(extra, dict) else [*SPECIAL[3:], *extra]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[EOS],
        extra_special_tokens=named,
        chat_template=chat_template,
    )


def begin_texts(tokens: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Let a tokenizer put its first token before every text, as Llama's does; it is changed and returned."""
    first = SPECIAL[BOS]
    tokens.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, BOS)]
    )
    return tokens
