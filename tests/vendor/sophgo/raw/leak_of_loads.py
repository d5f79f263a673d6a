"""On the raw C library: what loading a bmodel and giving it back costs in memory that does not come back.

python leak_of_loads.py FOLDER BMODEL LOADS, with a folder of an emulator (the cache folder's sophgo/emulators/<chip>)
and a bmodel of that chip. Odd loads are from the file, even ones from bytes. Another runtime stays, as an engine on the
device would. Prints the KiB that the process holds (VmRSS) before the loads and after, each after the same number of
loads that warm it up. Standard library and ctypes only.
"""

import ctypes
import sys
from ctypes import byref, c_bool, c_char_p, c_int, c_size_t, c_void_p

WARM = 20


def resident() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main(folder: str, bmodel: str, loads: int) -> None:
    bmlib = ctypes.CDLL(f"{folder}/libbmlib.so.0", ctypes.RTLD_GLOBAL)
    bmrt = ctypes.CDLL(f"{folder}/libbmrt.so.1.0", ctypes.RTLD_GLOBAL)
    bmlib.bm_dev_request.argtypes = (c_void_p, c_int)
    bmlib.bm_dev_free.argtypes = bmrt.bmrt_destroy.argtypes = (c_void_p,)
    bmrt.bmrt_create.argtypes, bmrt.bmrt_create.restype = (c_void_p,), c_void_p
    bmrt.bmrt_load_bmodel.argtypes, bmrt.bmrt_load_bmodel.restype = (c_void_p, c_char_p), c_bool
    bmrt.bmrt_load_bmodel_data.argtypes = (c_void_p, c_char_p, c_size_t)
    bmrt.bmrt_load_bmodel_data.restype = c_bool
    handle = c_void_p()
    assert bmlib.bm_dev_request(byref(handle), 0) == 0
    with open(bmodel, "rb") as file:
        data = file.read()

    def loaded(index: int) -> int:
        runtime = bmrt.bmrt_create(handle)
        if index % 2:
            assert bmrt.bmrt_load_bmodel(runtime, bmodel.encode())
        else:
            assert bmrt.bmrt_load_bmodel_data(runtime, data, len(data))
        return runtime

    kept = loaded(0)
    for index in range(WARM):
        bmrt.bmrt_destroy(loaded(index))
    before = resident()
    for index in range(loads):
        bmrt.bmrt_destroy(loaded(index))
    print("resident", before, resident(), flush=True)
    bmrt.bmrt_destroy(kept)
    bmlib.bm_dev_free(handle)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
