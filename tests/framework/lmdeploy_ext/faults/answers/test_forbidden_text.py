"""``bad_words`` against decoding each continuation: a token is forbidden exactly where it would complete the text."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.lmdeploy_ext.faults.answers.forbidden_text import forbid
from tests.e2e.harness import Lab


def byte_level(lab: Lab) -> Any:
    return AutoTokenizer.from_pretrained(lab.model("llama"))


def sentence_piece(_: Lab) -> Any:
    """A vocabulary as SentencePiece's, with bytes for characters that it lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁the", "the", "he", "▁fox", "fo", "x", "a", "b", "ab", "bab", "▁▁", "t", "h", "e"]
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(content=" ", left=1, right=0),
    ]
    inner.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def lmdeploys(tokenizer: Any) -> Any:
    """As LMDeploy wraps it."""
    return SimpleNamespace(model=SimpleNamespace(model=tokenizer))


def text(tokenizer: Any, ids: list[int]) -> str:
    names = tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True)
    return tokenizer.convert_tokens_to_string(names)


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("seed", range(6))
def test_exactly_what_would_complete_it(make: Any, seed: int, lab: Lab):
    rng = random.Random(seed)
    tokenizer = make(lab)
    size = len(tokenizer.get_vocab())
    first = tokenizer.encode("the", add_special_tokens=False)
    # A text that tokens of the vocabulary spell, cut at any character; it meets itself again and again.
    phrase = ""
    while phrase in text(tokenizer, first):
        spelt = text(tokenizer, [*first, *rng.choices(range(259, size), k=4)]).replace("\ufffd", "")
        begin = rng.randrange(max(len(spelt) - 6, 1))
        phrase = spelt[begin : begin + rng.randint(1, 6)]
    processor = forbid(phrase, lmdeploys(tokenizer), skip_special_tokens=True)
    ids = list(first)
    useful = [token for token in range(size) if set(text(tokenizer, [first[0], token])[-3:]) & set(phrase)]
    checked = 0
    for _ in range(12):
        logits = processor(torch.tensor(ids), torch.zeros(size))
        if phrase not in text(tokenizer, ids):
            before = text(tokenizer, ids)
            wrong = [
                token
                for token in range(size)
                if (phrase in text(tokenizer, [*ids, token])) != bool(logits[token] < 0)
                and "\ufffd" not in text(tokenizer, [*ids, token]).removeprefix(before)
            ]
            assert not wrong, (phrase, before, [text(tokenizer, [token]) for token in wrong])
            checked += 1
        allowed = [token for token in useful if logits[token] == 0] or [rng.randrange(size)]
        ids.append(rng.choice(allowed))
    assert checked > 3


def test_it_may_begin_in_one_token_and_end_two_later(lab: Lab):
    tokenizer = byte_level(lab)
    processor = forbid("the quick", lmdeploys(tokenizer), skip_special_tokens=True)
    ids = tokenizer.encode(" the quic", add_special_tokens=False)
    assert len(ids) > 1
    (last,) = tokenizer.encode("k", add_special_tokens=False)
    logits = processor(torch.tensor(ids), torch.zeros(len(tokenizer.get_vocab())))
    assert logits[last] == -torch.inf
    assert processor(torch.tensor(ids[:-1]), torch.zeros(len(logits)))[last] == 0


def test_a_special_token_between_does_not_hide_it(lab: Lab):
    """Special tokens are no part of the text, so the text around them is one."""
    tokenizer = byte_level(lab)
    a, b, c = (tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    ids = torch.tensor([a, tokenizer.all_special_ids[3], b])
    for skip, value in ((True, -torch.inf), (False, 0.0)):
        processor = forbid("abc", lmdeploys(tokenizer), skip_special_tokens=skip)
        assert processor(ids, torch.zeros(1000))[c] == value


def test_a_tokenizer_whose_texts_do_not_join_is_refused():
    inner = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2, "word": 3}, unk_token="[UNK]")
    )
    inner.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    with pytest.raises(UnsupportedFeatureError, match="bad_words"):
        forbid("able", lmdeploys(tokenizer), skip_special_tokens=True)


def test_it_can_be_sent_to_another_process(lab: Lab):
    import pickle

    processor = forbid("the fox", lmdeploys(byte_level(lab)), skip_special_tokens=True)
    again = pickle.loads(pickle.dumps(processor))
    ids = torch.tensor(byte_level(lab).encode("the fo", add_special_tokens=False))
    assert torch.equal(processor(ids, torch.zeros(1000)), again(ids, torch.zeros(1000)))
