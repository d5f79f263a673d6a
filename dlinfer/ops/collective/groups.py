"""Numbers for torch's process groups, so that a group can be an argument of an op.

Ranks of one model register their groups in the same order, so a number means the same group on each of them, and in
graphs that are kept on disk.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch may be built without it
    from torch.distributed import ProcessGroup

ALONE = -1
"""The group of this process alone."""

_groups: list["ProcessGroup | None"] = []
_numbers: dict[str, int] = {}


def register(group: "ProcessGroup") -> int:
    """Return the number of a process group, which may be registered already."""
    number = _numbers.get(group.group_name)
    if number is None:
        number = _groups.index(None) if None in _groups else len(_groups)
        _groups[number : number + 1] = [group]
        _numbers[group.group_name] = number
    return number


def forget(number: int) -> None:
    """Free the number of a group that is about to end."""
    group = _groups[number]
    if group is not None:
        del _numbers[group.group_name]
        _groups[number] = None


def number_of(group: "ProcessGroup") -> int:
    """Return the number of a registered group. Dynamo reads it as a constant. Raises KeyError for another group."""
    return _numbers[group.group_name]


def process_group(number: int) -> "ProcessGroup":
    """Return the process group of a number. Raises ValueError if there is none."""
    group = _groups[number] if 0 <= number < len(_groups) else None
    if group is None:
        raise ValueError(f"group {number} is not registered in this process")
    return group
