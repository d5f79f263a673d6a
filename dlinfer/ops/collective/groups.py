"""Give torch's process groups numbers, so that an op can take a group as an argument.

All ranks of a model register their groups in the same order. So a number means the same group on each rank, and also in
graphs that are loaded from the disk cache.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch may be built without it
    from torch.distributed import ProcessGroup

ALONE = -1
"""Number of a group that consists of this process only."""

_groups: list["ProcessGroup | None"] = []
_numbers: dict[str, int] = {}


def register(group: "ProcessGroup") -> int:
    """Return the number of a process group. Register the group if it is not registered."""
    number = _numbers.get(group.group_name)
    if number is None:
        number = _groups.index(None) if None in _groups else len(_groups)
        _groups[number : number + 1] = [group]
        _numbers[group.group_name] = number
    return number


def forget(number: int) -> None:
    """Make the number of a group available for other groups. Call this before the group is destroyed."""
    group = _groups[number]
    if group is not None:
        del _numbers[group.group_name]
        _groups[number] = None


def number_of(group: "ProcessGroup") -> int:
    """Return the number of a registered group. Raises KeyError for other groups.

    Dynamo treats the number as a constant.
    """
    return _numbers[group.group_name]


def process_group(number: int) -> "ProcessGroup":
    """Return the process group with a number. Raises ValueError if no group has this number."""
    group = _groups[number] if 0 <= number < len(_groups) else None
    if group is None:
        raise ValueError(f"group {number} is not registered in this process")
    return group
