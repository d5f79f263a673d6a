"""The right answers that questions carry are torch's own, so that an engine is not refused for what torch does."""

import pytest
import torch
from torch.utils import _pytree as pytree

from dlinfer.graph.selftest.answer import what_is_wrong
from dlinfer.graph.selftest.questions import QUESTIONS, ROUNDED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_torch_gives_the_right_answer(question, dtype):
    results = pytree.tree_leaves(question.function(*question.given(dtype)))
    tolerance = max(
        (question.tolerance or {}).get(dtype, 0.0), 4 * ROUNDED[dtype] if question.tolerance else 0.0
    )
    assert what_is_wrong(results, question.answer(dtype), tolerance) is None


def test_each_question_has_a_name_of_its_own_and_decides_something():
    names = [question.name for question in QUESTIONS]
    assert len(set(names)) == len(names)
    assert all(kind.startswith(("aten.", "dlinfer.")) for question in QUESTIONS for kind in question.decides)
