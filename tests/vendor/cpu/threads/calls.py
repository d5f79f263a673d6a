"""threads/library.cpp as Python calls it; without torch, so that a process of a test starts at once."""

import ctypes


def load(path: str) -> ctypes.CDLL:
    """As ctypes opens it, with the types of its functions."""
    loaded = ctypes.CDLL(path)
    whole, counts = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    loaded.count.argtypes, loaded.count.restype = [whole, whole, whole, whole, counts], None
    loaded.shortest.argtypes, loaded.shortest.restype = [whole, whole, whole], whole
    loaded.threads_met.argtypes, loaded.threads_met.restype = [whole], whole
    loaded.nested.argtypes, loaded.nested.restype = [whole, whole, counts], whole
    loaded.fails.argtypes, loaded.fails.restype = [whole, whole, whole, counts], whole
    loaded.flushes_as_caller.argtypes, loaded.flushes_as_caller.restype = [whole], whole
    loaded.fetches.argtypes, loaded.fetches.restype = [whole, whole], whole
    loaded.will_share.argtypes, loaded.will_share.restype = [ctypes.c_void_p, whole], None
    return loaded


def counted(team: ctypes.CDLL, begin: int, end: int, grain: int = 1, microseconds: int = 0) -> bool:
    """Whether each index of a range was done once, and no other."""
    counts = (ctypes.c_int64 * (max(end, 0) + 3))()
    team.count(begin, end, grain, microseconds, counts)
    return set(counts[begin : max(begin, end)]) <= {1} and sum(counts) == max(end - begin, 0)


def gets(team: ctypes.CDLL, threads: int) -> bool:
    """Whether so many threads take part in a job: on a busy machine not in each one, and never more."""
    met = 0
    for _ in range(200):
        met = max(met, team.threads_met(40))
        if met >= threads:
            break
    return met == threads
