"""What is forgiven because every compiler of torch's does it."""

import torch

from tests.fuzz import compilers, execute
from tests.fuzz.program import Call, Input, Program, Step

X = Input("x", "argument", "float32", (3, 2), "transposed")
READ = Step("v", "{0}[9]", ("x",))
WRITE = Step("", "{0}.add_(1)", ("x",), features=("write",))


def program(*steps: Step, returns: str = "w") -> Program:
    return Program(1, (X,), (Step("w", "F.logsigmoid({0})", ("x",)), *steps), (returns,), (Call(),))


def test_strides_of_fakes():
    x = torch.ones(2, 3).t()
    assert compilers.fake_strides(program(), 0, 0) == (1, 3)
    assert torch.nn.functional.logsigmoid(x).stride() == (2, 1), "torch's kernel now gives what its fake does"


def test_a_step_whose_result_nothing_reads_may_be_left_out():
    assert compilers.unused_step_raises(program(READ))
    assert compilers.unused_step_raises(program(READ, Step("", "{0}.sin_()", ("v",), features=("write",))))


def test_a_write_into_what_nothing_reads_may_be_left_out():
    copied = Step("v", "{0} * 2", ("x",))
    beyond = Step("", "{0}[9] = 1", ("v",), features=("write",))
    assert compilers.unused_step_raises(program(copied, beyond))
    assert not compilers.unused_step_raises(program(copied, beyond, returns="v"))
    assert not compilers.unused_step_raises(program(Step("v", "{0}[1:]", ("x",)), beyond))


def test_one_that_something_reads_may_not():
    assert not compilers.unused_step_raises(program(READ, returns="v"))
    written = Step("", "{0}.add_({1}.sum())", ("x", "v"), features=("write",))
    assert not compilers.unused_step_raises(program(READ, written))
    assert not compilers.unused_step_raises(program(Step("", "{0}[9] = 1", ("x",), features=("write",))))


def test_one_of_which_only_the_sizes_are_read_may_be_left_out():
    counted = Step("u", "torch.arange({0}.numel()) + {0}.shape[0]", ("v",))
    assert compilers.unused_step_raises(program(READ, counted, returns="u"))
    doubled = Step("d", "{0} * 2", ("v",))
    assert compilers.unused_step_raises(program(READ, doubled, Step("u", "{0}.dim()", ("d",)), returns="u"))
    summed = Step("u", "torch.arange({0}.numel()) + {0}", ("v",))
    assert not compilers.unused_step_raises(program(READ, summed, returns="u"))


def test_a_write_that_a_later_one_hides_may_be_left_out():
    beyond = Step("", "{0}[9] = 1", ("x",), features=("write",))
    hiding = Step("", "{0}[...] = 3", ("x",), features=("write",))
    whole, smaller = program(beyond, hiding, returns="x"), program(hiding, returns="x")
    model, kept = execute.module(smaller)
    given = execute.calls(smaller, execute.plain(model), kept)
    assert compilers.overwritten_step_raises(whole, 0, given)
    given[0].results[0].fill_(7)  # not what the other writes leave
    assert not compilers.overwritten_step_raises(whole, 0, given)
