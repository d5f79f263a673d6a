"""Which KV blocks are free, and where each block of a sequence stands."""

from dataclasses import dataclass, field

DEVICE, HOST = "device", "host"


class FreeBlocks:
    """Free blocks of one kind of memory."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self.count = count

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block. Raises IndexError where there is none."""
        return self._free.pop()

    def give(self, block: int) -> None:
        """Take a block back."""
        assert block not in self._free, f"block {block} is freed twice"
        self._free.append(block)


@dataclass
class Placed:
    """A sequence's blocks in order: (DEVICE or HOST, number)."""

    places: list[tuple[str, int]] = field(default_factory=list)

    @property
    def on_device(self) -> list[int]:
        """The blocks that are on the device, in order."""
        return [block for place, block in self.places if place == DEVICE]

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are on the device, so that the sequence may run."""
        return all(place == DEVICE for place, _ in self.places)


class Memory:
    """The blocks of a generator's pool. ``moves`` are the swaps to hand to ``GeneratorTorch.swap`` before a step."""

    def __init__(self, device_blocks: int, host_blocks: int) -> None:
        self.device = FreeBlocks(device_blocks)
        self.host = FreeBlocks(host_blocks)
        self.moves: list[list[int]] = []

    def grow(self, placed: Placed, blocks: int) -> bool:
        """Give a sequence device blocks until it has so many; false, and nothing given, where there are too few."""
        missing = blocks - len(placed.places)
        if missing > len(self.device):
            return False
        placed.places += [(DEVICE, self.device.take()) for _ in range(missing)]
        return True

    def swap_out(self, placed: Placed, blocks: int) -> int:
        """Move up to so many of a sequence's device blocks to the host, its last ones first; how many were moved."""
        moved = 0
        for index in range(len(placed.places) - 1, -1, -1):
            place, block = placed.places[index]
            if moved == blocks or not len(self.host):
                break
            if place == DEVICE:
                target = self.host.take()
                self.moves.append([1, block, target])
                placed.places[index] = (HOST, target)
                self.device.give(block)
                moved += 1
        return moved

    def swap_in(self, placed: Placed) -> bool:
        """Move a sequence's host blocks to the device; false, and nothing moved, where there are too few."""
        away = [index for index, (place, _) in enumerate(placed.places) if place == HOST]
        if len(away) > len(self.device):
            return False
        for index in away:
            _, block = placed.places[index]
            target = self.device.take()
            self.moves.append([0, block, target])
            placed.places[index] = (DEVICE, target)
            self.host.give(block)
        return True

    def free(self, placed: Placed) -> None:
        """Take all blocks of a sequence back."""
        for place, block in placed.places:
            (self.device if place == DEVICE else self.host).give(block)
        placed.places.clear()

    def take_moves(self) -> list[list[int]]:
        """The swaps since the last call."""
        moves, self.moves = self.moves, []
        return moves
