"""Nothing is forgiven that the documentation does not say."""

from pathlib import Path

from tests.fuzz.limits import undocumented


def test_each_limit_is_a_line_of_the_docs():
    docs = Path(__file__).parents[2] / "docs" / "engines.md"
    assert undocumented(docs.read_text()) == []
