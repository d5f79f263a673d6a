"""``dlinfer.compile``: the module's results ahead of time, and no other call than what it was compiled for."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import dlinfer
from dlinfer.errors import (
    ArtifactInputError,
    CaptureError,
    CompileOptionError,
    EngineUnavailableError,
)

pytestmark = pytest.mark.usefixtures("graph_mode")

ROWS = Dim("rows", min=2, max=64)


class Block(nn.Module):
    """A layer with keyword, optional and constant arguments, and a tuple of results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, other=None, *, scale: float = 1.0):
        y = self.linear(self.norm(x)).relu() * scale
        return y, {"sum": y.sum(-1) if other is None else (y + other).sum(-1)}


class Sum(nn.Module):
    def forward(self, x, y):
        return (x + y) * 2 + x.sin()


def given(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def same(artifact, module, *args, **kwargs):
    with torch.no_grad():
        torch.testing.assert_close(artifact(*args, **kwargs), module(*args, **kwargs), rtol=1e-5, atol=1e-5)


class Minus(nn.Module):
    def forward(self, x, y):
        return x - y


def test_it_is_called_like_the_module_for_all_sizes_in_the_range():
    block = Block().eval()
    artifact = dlinfer.compile(block, (given(5),), dynamic_shapes={"x": {0: ROWS}})
    for rows in (2, 5, 64):
        same(artifact, block, given(rows, seed=rows))
    assert artifact.report.placed("eager") == []
    assert artifact.report.cause == "dlinfer.compile"


def test_keywords_and_constants_keep_their_place():
    block = Block().eval()
    artifact = dlinfer.compile(block, (given(5), given(5, 1)), {"scale": 0.5})
    same(artifact, block, given(5, 2), given(5, 3), scale=0.5)
    for wrong, message in [
        (lambda: artifact(given(5), given(5), scale=0.25), "expected 0.5, given 0.25"),
        (lambda: artifact(given(5), given(5)), "'scale' .*expected a keyword"),
        (lambda: artifact(given(5), scale=0.5), "arguments"),
        (lambda: artifact(given(4), given(5), scale=0.5), r"given sizes \(4, 8\)"),
        (lambda: artifact(given(5).double(), given(5), scale=0.5), "given torch.float64"),
        (lambda: artifact([1.0], given(5), scale=0.5), "arguments"),
    ]:
        with pytest.raises(ArtifactInputError, match=message):
            wrong()


def test_weights_are_shared_and_not_copied():
    block = Block().eval()
    artifact = dlinfer.compile(block, (given(3),))
    pointers = {weight.data_ptr() for weight in artifact.weights}
    assert {parameter.data_ptr() for parameter in block.parameters()} <= pointers
    with torch.no_grad():
        block.linear.weight.mul_(2)
    same(artifact, block, given(3, 1))


def test_a_tensor_that_is_given_twice_as_an_example_stands_for_two_arguments():
    x = given(2)
    artifact = dlinfer.compile(Minus(), (x, x), engine="inductor")
    first, second = given(2), given(2)
    torch.testing.assert_close(artifact(first, second), first - second)


def test_a_weight_that_is_given_as_an_example_stands_for_any_argument():
    layer = nn.Linear(4, 4, bias=False).eval()
    artifact = dlinfer.compile(layer, (layer.weight,), engine="inductor")
    x = torch.randn(4, 4)
    torch.testing.assert_close(artifact(x), layer(x))


def test_buffers_are_written_in_place():
    class Keeps(nn.Module):
        cache: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, 8))

        def forward(self, x, slot):
            self.cache.index_copy_(0, slot, x)
            return self.cache.sum(0) * 2 + 1

    mine, theirs = Keeps(), Keeps()
    slots = torch.arange(3)
    artifact = dlinfer.compile(mine, (given(3), slots))
    where = mine.cache.data_ptr()
    for start in (0, 3, 6):
        torch.testing.assert_close(
            artifact(given(3, start), slots + start), theirs(given(3, start), slots + start)
        )
    assert mine.cache.data_ptr() == where
    torch.testing.assert_close(mine.cache, theirs.cache)


def test_sizes_that_must_be_equal_are_checked():
    artifact = dlinfer.compile(Sum(), (given(5), given(5)), dynamic_shapes={"x": {0: ROWS}, "y": {0: ROWS}})
    same(artifact, Sum(), given(7), given(7, 1))
    with pytest.raises(ArtifactInputError, match=r"x\.size\(\)\[0\] == y\.size\(\)\[0\], given 7, 5"):
        artifact(given(7), given(5))


def test_sizes_that_are_computed_from_others_are_checked():
    class Pairs(nn.Module):
        def forward(self, x, y):
            return x.sin() * 2 + 1, torch.cat([x, x]) * y

    artifact = dlinfer.compile(
        Pairs(), (given(5), given(10)), dynamic_shapes={"x": {0: ROWS}, "y": {0: 2 * ROWS}}
    )
    same(artifact, Pairs(), given(4), given(8))
    with pytest.raises(ArtifactInputError, match=r"y\.size\(\)\[0\] == 2\*x\.size\(\)\[0\]"):
        artifact(given(4), given(9))


def test_memory_that_lies_otherwise_is_copied():
    artifact = dlinfer.compile(Sum(), (given(8), given(8)))
    same(artifact, Sum(), given(8), given(8).t().contiguous())
    same(artifact, Sum(), given(8), given(8).t())


def test_memory_that_lies_otherwise_is_refused_where_it_is_written():
    class Adds(nn.Module):
        def forward(self, x, y):
            return x.add_(y) * 2

    artifact = dlinfer.compile(Adds(), (given(8), given(8)))
    written = given(8)
    torch.testing.assert_close(artifact(written, given(8).t()), Adds()(given(8), given(8).t()))
    assert torch.equal(written, given(8) + given(8).t())
    with pytest.raises(ArtifactInputError, match=r"given sizes \(8, 8\) with strides \(1, 8\)"):
        artifact(given(8).t(), given(8))


def test_memory_that_lay_otherwise_must_again():
    artifact = dlinfer.compile(Sum(), (given(8).t(), given(8)))
    same(artifact, Sum(), given(8, 3).t(), given(8))
    with pytest.raises(ArtifactInputError, match=r"expected .*strides"):
        artifact(given(8), given(8))


def test_an_input_that_is_read_by_a_place_in_its_memory_must_begin_where_the_example_did():
    class Next(nn.Module):
        def forward(self, x, y):
            return x.as_strided((2,), (1,), x.storage_offset() + 1) + y

    artifact = dlinfer.compile(Next(), (torch.arange(3.0), torch.zeros(2)))
    part = torch.arange(10.0)[4:7]
    torch.testing.assert_close(artifact(part.clone(), torch.arange(5.0)[1:3]), torch.tensor([6.0, 8.0]))
    with pytest.raises(
        ArtifactInputError, match=r"'x'.* begins at element 4 of its memory: pass its clone\(\)"
    ):
        artifact(part, torch.zeros(2))


def test_strides_of_its_own_begin_where_the_input_does(tmp_path):
    class Windows(nn.Module):
        def forward(self, x):
            return x.as_strided((3, 2), (1, 1)) * 2

    artifact = dlinfer.compile(Windows(), (torch.arange(4.0),))
    artifact.save(tmp_path / "windows.dlinfer")
    part = torch.arange(10.0)[4:8]
    torch.testing.assert_close(artifact(part), Windows()(part))
    with dlinfer.load(tmp_path / "windows.dlinfer") as session:
        (loaded,) = session.run({"x": part}).values()
    torch.testing.assert_close(loaded, Windows()(part))


def test_an_exported_program_is_left_as_it_was():
    block = Block().eval()
    exported = torch.export.export(block, (given(4),))
    before = exported.graph_module.code
    artifact = dlinfer.compile(exported)
    same(artifact, block, given(4, 1))
    assert exported.graph_module.code == before
    torch.testing.assert_close(exported.module()(given(4, 2)), block(given(4, 2)))


def test_a_functionalised_export_with_writes_is_refused():
    class Counts(nn.Module):
        seen: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1)
            return x * 2 + self.seen

    exported = torch.export.export(Counts(), (given(2),)).run_decompositions()
    with pytest.raises(CaptureError, match="its writes are outputs of the graph"):
        dlinfer.compile(exported)


def test_what_cannot_be_exported_is_named():
    class Branches(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(CaptureError, match=r"torch\.export") as caught:
        dlinfer.compile(Branches(), (given(2),))
    assert 'use torch.compile(backend="dlinfer")' in caught.value.step


class KeyValueCache:
    pass


def test_the_step_fits_what_torch_export_refuses():
    class Decoder(nn.Module):
        def forward(self, x, cached=True):
            return x * 2, KeyValueCache() if cached else None

    rows = {0: Dim("rows", max=8)}
    with pytest.raises(CaptureError, match="need to register a pytree for it \\(at") as caught:  # no link
        dlinfer.compile(Decoder(), (given(2),))
    assert caught.value.step.startswith("set model.config.use_cache = False")
    for shapes, reason in (
        ({"x": rows}, "top-level keys"),
        ({"x": {1: Dim("n")}, "cached": None}, "constant"),
    ):
        with pytest.raises(CaptureError, match=reason) as caught:
            dlinfer.compile(Decoder(), (torch.ones(2, 1),), {"cached": False}, dynamic_shapes=shapes)
        assert caught.value.step == "correct dynamic_shapes or the example call."


def test_other_keywords_than_at_the_compilation_are_named():
    artifact = dlinfer.compile(Sum(), (given(2),), {"y": given(2)})
    for kwargs, name in (({}, "'y'.* expected a keyword argument, given none"), ({"y": 1, "z": 2}, "'z'")):
        with pytest.raises(ArtifactInputError, match=name) as caught:
            artifact(given(2), **kwargs)
        assert caught.value.step == "pass the same positional and keyword arguments as at the compilation."


def test_engine_and_options_are_checked():
    with pytest.raises(EngineUnavailableError, match="no_such_engine"):
        dlinfer.compile(Sum(), (given(2), given(2)), engine="no_such_engine")
    with pytest.raises(CompileOptionError, match="fallbak"):
        dlinfer.compile(Sum(), (given(2), given(2)), options={"fallbak": "warn"})


class Seen(nn.Module):
    """Notes the seed of torch's generator whenever its code runs."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.seeds: set[int] = set()

    def forward(self, x):
        self.seeds.add(torch.initial_seed())
        return x * 2 + torch.rand_like(x) if self.draws else x * 2 + 1


@pytest.mark.parametrize("draws", [False, True])
def test_trials_at_small_sizes_leave_the_generator_alone_unless_the_module_draws(draws):
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    module = Seen(draws)
    with torch.no_grad():
        dlinfer.compile(module, (given(4),), dynamic_shapes=({0: Dim("rows", min=0, max=64)},))
    assert module.seeds == ({0, 1234} if draws else {1234})
    assert draws or torch.equal(torch.get_rng_state(), state)
