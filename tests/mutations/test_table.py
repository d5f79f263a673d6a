"""Each fault of the table can be put into the code as it stands, and its tests are there."""

import pytest

from tests.mutations.__main__ import ROOT
from tests.mutations.table import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_it_can_be_put(mutation):
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    changed = text.replace(mutation.old, mutation.new)
    compile(changed, mutation.file, "exec")
    assert all((ROOT / one).is_file() for one in mutation.tests if one.startswith("tests/"))
