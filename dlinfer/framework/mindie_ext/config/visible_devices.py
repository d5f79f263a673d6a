"""The devices that a process sees.

``ASCEND_RT_VISIBLE_DEVICES`` lists device numbers, such as "0,1,3". If the variable is not set, the ranks use the
devices 0, 1, 2, and so on. On a machine without NPUs all ranks share the host's CPU, and the numbers have no effect.
"""

import os

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"


def visible_devices(world_size: int) -> list[int]:
    """Return the numbers of the devices that this process sees. The key npu_device_id is an index into this list.

    world_size: the number of devices to assume if ``ASCEND_RT_VISIBLE_DEVICES`` is not set.

    Raises ValueError for a malformed list.
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
