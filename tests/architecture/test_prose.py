"""The prose check finds what it looks for, and leaves plain sentences alone."""

import pytest

from tests.architecture.prose import LONGEST, findings

PLAIN = (
    '"""Runs a region. Raises RefusedError if the engine does not take it: what it takes is in the docs."""\n'
)


def reasons(tmp_path, text: str, name: str = "module.py") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [finding.why for finding in findings([path])]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"""Nodes of which one is a write."""', "relative clause"),
        ('"""What a region compiles to."""', "clause as its subject"),
        ('"""Returns a graph. Written are its inputs."""', "verb before subject"),
        ("# The user is told of it.\n", "without its subject"),
        ("def function(given):\n    pass\n", "name that says nothing"),
        ("found = 1\n", "name that says nothing"),
        (f'"""{"word " * (LONGEST + 1)}."""', "words in a sentence"),
    ],
)
def test_it_finds(tmp_path, text, why):
    (reason,) = reasons(tmp_path, text)
    assert why in reason


def test_it_reads_comments_of_cpp_and_paragraphs_of_pages(tmp_path):
    assert reasons(tmp_path, "int x;\n// Blocks of which each\n// is packed.\n", "kernel.cpp")
    page = "# Title\n\nTensors, some of which are packed.\n\n```python\na = 'of which'\n```\n"
    assert len(reasons(tmp_path, page, "page.md")) == 1


def test_it_leaves_plain_sentences_code_and_questions_alone(tmp_path):
    assert reasons(tmp_path, PLAIN) == []
    assert reasons(tmp_path, '"""Compares ``one of which``. What is new? Nothing."""') == []
