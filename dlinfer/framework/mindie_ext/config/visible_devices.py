"""Which devices a process sees.

``ASCEND_RT_VISIBLE_DEVICES`` lists device numbers, "0,1,3"; unset, all are visible. Where there is no such device the
ranks share the host's CPU: then unset means one place a rank, and a list has as many places as numbers.
"""

import os

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"


def visible_devices(world_size: int) -> list[int]:
    """The numbers of the visible devices; npu_device_id is an index into them.

    world_size: how many places there are where the variable is unset. Raises ValueError for a list that is none.
    """
    listed = os.environ.get(VARIABLE)
    if listed is None:
        return list(range(world_size))
    parts = [part.strip() for part in listed.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"device numbers separated by commas, not {listed!r}")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"each device once, not {listed!r}")
    return numbers
