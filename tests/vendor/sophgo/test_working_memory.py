"""What stands between BMRuntime and an emulator's bmlib: which memory is kept, given out again and given back."""

import ctypes
from itertools import count

import pytest

from dlinfer.vendor.sophgo.runtime.child.layout import LargeMemory
from dlinfer.vendor.sophgo.runtime.child.working_memory import WorkingMemory

DEVICE, OTHER = 1, 2


class Library:
    """A bmlib of two functions: what it has handed out, address -> size."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}
        self._addresses = count(4096, 4096)

    def bm_malloc_device_byte_u64(self, handle, made, size) -> int:
        if size > 2**32:
            return 5
        made[0].address, made[0].size = next(self._addresses), size
        self.given[made[0].address] = size
        return 0

    def bm_free_device_u64(self, handle, block) -> None:
        del self.given[block.address]


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def memory(library):
    made = WorkingMemory(library)
    made.expect(working=[100, 300, 500], weights=[500, 700])
    return made


def allocate(memory: WorkingMemory, size: int, handle: int = DEVICE) -> LargeMemory:
    block = LargeMemory()
    assert memory.allocating(handle, ctypes.pointer(block), size) == 0
    return block


def release(memory: WorkingMemory, block: LargeMemory) -> None:
    memory.releasing(DEVICE, ctypes.pointer(block))


def test_what_networks_worked_in_is_kept_and_given_out_again(memory, library):
    small = allocate(memory, 100)
    release(memory, small)
    large = allocate(memory, 300)
    assert large.address != small.address
    release(memory, large)
    memory.expect(working=[300], weights=[])
    again = allocate(memory, 100)
    assert (again.address, again.size) == (small.address, 100)
    assert allocate(memory, 300).address == large.address
    assert sorted(library.given.values()) == [100, 300]


def test_a_bmodels_own_are_different_ones(memory, library):
    """One stage may work in several at once."""
    first, second = allocate(memory, 300), allocate(memory, 300)
    assert first.address != second.address
    memory.expect(working=[], weights=[])
    assert {allocate(memory, 300).address for _ in range(2)} == {first.address, second.address}
    assert len(library.given) == 2


def test_weights_are_given_back_and_never_given_out_again(memory, library):
    weights = allocate(memory, 700)
    release(memory, weights)
    assert not library.given
    allocate(memory, 700)
    assert allocate(memory, 300).address not in (0, weights.address)
    assert sorted(library.given.values()) == [300, 700]


def test_what_may_be_either_is_nobody_elses(memory, library):
    """A stage works in as many bytes as another's weights take."""
    either = allocate(memory, 500)
    memory.expect(working=[], weights=[])
    assert allocate(memory, 500).address != either.address
    assert allocate(memory, 300).address not in library_addresses_of(library, 500)
    release(memory, either)
    assert either.address in library.given


def library_addresses_of(library: Library, size: int) -> list[int]:
    return [address for address, bytes_ in library.given.items() if bytes_ == size]


def test_an_allocation_of_no_bytes_has_an_address(memory, library):
    """BMRuntime asks for none when the last network that needs some goes, and bmlib's pool then loses its count."""
    kept = allocate(memory, 100)
    release(memory, kept)
    assert allocate(memory, 0).address == kept.address
    memory.give_back()
    assert not library.given
    assert allocate(memory, 0).address in library.given


def test_devices_share_nothing(memory):
    first = allocate(memory, 100)
    memory.expect(working=[], weights=[])
    assert allocate(memory, 100, OTHER).address != first.address


def test_a_failure_is_bmruntimes_to_see(memory, library):
    memory.expect(working=[2**33], weights=[])
    assert memory.allocating(DEVICE, ctypes.pointer(LargeMemory()), 2**33) == 5
    memory.give_back()
    assert not library.given
