"""On the raw C library: a stage runs in memory that BMRuntime gave back when it loaded a larger one of its network.

python growing_stages.py FOLDER BMODEL NETWORK ROWS FLAGS, with a folder of an emulator (the cache folder's
sophgo/emulators/<chip>), a bmodel of that chip with a network whose later stages work in more memory, and the rows of
its inputs [1, rows, 16] in its first stage, which is run three times. Where the first run wrote over commands, the
second may end the process, wait for ever, or give other numbers. FLAGS goes to bmrt_set_flags; ``own`` leaves
BMRuntime's own. Standard library and ctypes only.
"""

import ctypes
import sys
from ctypes import byref, c_bool, c_char_p, c_int, c_uint, c_void_p


class Shape(ctypes.Structure):
    _fields_ = (("num_dims", c_int), ("dims", c_int * 8))


def main(folder: str, bmodel: str, network: str, rows: str, flags: str) -> None:
    bmlib = ctypes.CDLL(f"{folder}/libbmlib.so.0", ctypes.RTLD_GLOBAL)
    bmrt = ctypes.CDLL(f"{folder}/libbmrt.so.1.0", ctypes.RTLD_GLOBAL)
    bmlib.bm_dev_free.argtypes = bmrt.bmrt_destroy.argtypes = (c_void_p,)
    bmrt.bmrt_create.argtypes, bmrt.bmrt_create.restype = (c_void_p,), c_void_p
    bmrt.bmrt_set_flags.argtypes = (c_void_p, c_uint)
    bmrt.bmrt_get_flags.argtypes, bmrt.bmrt_get_flags.restype = (c_void_p,), c_uint
    bmrt.bmrt_load_bmodel.argtypes, bmrt.bmrt_load_bmodel.restype = (c_void_p, c_char_p), c_bool
    several = ctypes.POINTER(c_void_p), ctypes.POINTER(Shape), c_int
    bmrt.bmrt_launch_data.argtypes = (c_void_p, c_char_p, *several, *several, c_bool)
    bmrt.bmrt_launch_data.restype = c_bool
    handle = c_void_p()
    assert bmlib.bm_dev_request(byref(handle), 0) == 0
    runtime = bmrt.bmrt_create(handle)
    if flags != "own":
        bmrt.bmrt_set_flags(runtime, int(flags))
    print("flags", bmrt.bmrt_get_flags(runtime), flush=True)
    assert bmrt.bmrt_load_bmodel(runtime, bmodel.encode())
    count = int(rows) * 16
    data = [(ctypes.c_uint16 * count)(*([0x3C00] * count)) for _ in range(3)]  # float16 ones
    shape = Shape(3, (1, int(rows), 16))
    places = [ctypes.cast(each, c_void_p).value for each in data]
    first = None
    for number in range(3):
        inputs, outputs = (c_void_p * 2)(*places[:2]), (c_void_p * 1)(places[2])
        found = (Shape * 1)()
        given = (Shape * 2)(shape, shape)
        assert bmrt.bmrt_launch_data(runtime, network.encode(), inputs, given, 2, outputs, found, 1, True)
        assert bmrt.bmrt_thread_sync(c_void_p(runtime)) == 0
        first = first or bytes(data[2])
        print("run", number, "as the first" if bytes(data[2]) == first else "differs", flush=True)
    bmrt.bmrt_destroy(runtime)
    bmlib.bm_dev_free(handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
