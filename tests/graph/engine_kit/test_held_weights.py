"""Weights built into a compiled callable: compared at each call, built in again when they changed."""

import threading

import pytest
import torch
from torch import nn

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.graph.engine_kit.held_weights import HeldWeights
from dlinfer.graph.engine_kit.weight_samples import _WINDOWS, WeightSamples


class Product:
    """x @ weight + bias with a copy of the weights taken when it is built."""

    def __init__(self) -> None:
        self.built: list[tuple[torch.Tensor, ...]] = []
        self.notes: list[str] = []
        self.run = HeldWeights([0, 2], ["weight", "x", "bias"], self.build, self.notes)

    def build(self, weights):
        weight, bias = (item.clone() for item in weights)
        self.built.append((weight, bias))
        return lambda _weight, x, _bias: x @ weight + bias


@pytest.fixture
def product():
    return Product()


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(3, 3))


bias, x = torch.randn(3), torch.randn(2, 3)


def right(product, weight, times):
    with torch.no_grad():
        torch.testing.assert_close(product.run(weight, x, bias), x @ weight + bias)
    assert (product.run.builds, len(product.notes)) == (times, times - 1)


def test_unchanged_weights_are_built_in_once(product, weight):
    assert (product.run.builds, product.run.nbytes) == (0, 0)
    for _ in range(3):
        right(product, weight, 1)
    assert product.run.nbytes == weight.nbytes + bias.nbytes


def test_released_weights_are_let_go_and_built_in_again(product):
    weight = nn.Parameter(torch.randn(3, 3))
    right(product, weight, 1)
    product.run.release()
    assert product.run.nbytes == 0
    with torch.no_grad():
        torch.testing.assert_close(product.run(weight, x, bias), x @ weight + bias)
    assert (product.run.builds, product.notes) == (2, [])  # no weight changed


CHANGES = {
    "written in place": lambda weight: weight.mul_(2),
    "copied into": lambda weight: weight.copy_(torch.randn(3, 3)),
    "given other memory": lambda weight: setattr(weight, "data", torch.randn(3, 3)),
    "written through a view": lambda weight: weight[0].zero_(),
    "written through data": lambda weight: weight.data.mul_(2),
    "merged": lambda weight: setattr(weight, "data", weight.data.add_(torch.ones(3, 1) @ torch.rand(1, 3))),
    "copied into data": lambda weight: weight.data.copy_(torch.randn(3, 3)),
    "one row through data": lambda weight: weight.data[1].zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed_and_told(product, weight, change):
    right(product, weight, 1)
    with torch.no_grad():
        change(weight)
    right(product, weight, 2)
    right(product, weight, 2)
    assert product.notes == ["compiled again because weights changed: weight"]


def test_another_tensor_is_noticed_even_where_the_old_one_is_gone(product):
    for times in range(1, 5):  # freed memory would be used again for the next of equal size
        right(product, nn.Parameter(torch.randn(3, 3)), times)


def test_another_view_of_the_same_memory_is_no_change(product, weight):
    right(product, weight, 1)
    right(product, weight.detach().view(3, 3), 1)


def test_tensors_without_a_count_of_writes_are_held_by_their_memory(product):
    with torch.inference_mode():
        weight, other = torch.randn(3, 3), torch.randn(3, 3)
    right(product, weight, 1)
    right(product, other, 2)


def test_many_changes_are_told_in_short():
    notes: list[str] = []
    run = HeldWeights(range(5), list("abcde"), lambda weights: lambda *inputs: 0, notes)
    run(*(torch.ones(1) for _ in range(5)))
    run(*(torch.ones(1) for _ in range(5)))
    assert notes == ["compiled again because weights changed: a, b, c and 2 more"]


def test_a_failure_to_build_leaves_what_was_there(product, weight):
    right(product, weight, 1)
    product.run._build = None  # any failure
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(TypeError):
        product.run(weight, x, bias)
    product.run._build = product.build
    right(product, weight, 2)


def test_nothing_held_is_built_once():
    run = HeldWeights([], ["x"], lambda weights: lambda x: x + len(weights), [])
    assert [run(1), run(2), run.builds] == [1, 2, 1]


def test_threads_build_once_for_each_change(product, weight):
    wrong: list[object] = []

    def work():
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(product.run(weight, x, bias), x @ weight + bias):
                    wrong.append("differs")

    for times in (1, 2):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (wrong, product.run.builds) == ([], times)
        with torch.no_grad():
            weight.add_(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64])
@pytest.mark.parametrize("part", range(8))
def test_an_eighth_of_a_weight_written_through_data_is_noticed(dtype, part):
    weight = nn.Parameter(torch.ones(64, 40).to(dtype), requires_grad=False)
    weights = [torch.ones(3), weight.detach(), torch.ones(2, 2).t()]
    samples = WeightSamples(weights)
    assert samples.same()
    weight.data[part * 8 : part * 8 + 8].zero_()
    assert not samples.same()
    assert samples.changed([0, 1, 2]) == {1}
    assert samples.changed([0, 2]) == set()


def test_unaligned_weights_and_elements_of_16_bytes_are_sampled():
    memory = torch.zeros(4 * 100 + 1, dtype=torch.uint8)
    unaligned = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=100, offset=1)
    wide = torch.zeros(40, dtype=torch.complex128)
    samples = WeightSamples([unaligned, wide])
    unaligned.data.fill_(1)
    assert samples.changed([0, 1]) == {0}
    wide.imag.data.fill_(1)
    assert samples.changed([0, 1]) == {0, 1}


def test_addresses_of_all_processors_are_in_the_view():
    """The upper half of ARM's 48 bits, and of 52, holds the memory that is mapped first."""
    for word, window in _WINDOWS.items():
        assert len(window) * word > 1 << 57


def test_weights_of_any_layout_are_sampled_inside_of_themselves():
    base = torch.arange(4000.0).view(40, 100)
    weights = [base[3:9, 10:90:7], base.t()[5:8], base[0, :1].expand(64), base[2, 3], torch.empty(0, 3)]
    weights.append(torch.zeros(3, 2).to_sparse())
    samples = WeightSamples(weights)
    outside = torch.ones(40, 100, dtype=torch.bool)
    flat = torch.arange(4000).view(40, 100)
    for one in (flat[3:9, 10:90:7], flat.t()[5:8], flat[0, :1], flat[2, 3]):
        outside.view(-1)[one.reshape(-1)] = False
    base[outside] = -1
    assert samples.same()
    base[2, 3] = 0
    assert samples.changed(range(6)) == {3}


def test_weights_made_under_inference_mode_are_sampled(product):
    with torch.inference_mode():
        weight = torch.randn(3, 3)
        right(product, weight, 1)
        weight.mul_(2)
        right(product, weight, 2)


def test_memory_that_a_weight_let_go_is_not_read(product):
    weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    right(product, weight, 1)
    kept = weight.detach().clone()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(36)
    with torch.no_grad():
        weight.copy_(kept)
    right(product, weight, 2)


@pytest.mark.parametrize("size", [0, 20])
def test_a_weight_without_its_memory_is_refused(product, weight, size):
    right(product, weight, 1)
    weight.untyped_storage().resize_(size)
    with pytest.raises(
        UnsupportedFeatureError, match=f"weight 'weight' with a storage of {size} bytes instead of 36"
    ):
        product.run(weight, x, bias)
