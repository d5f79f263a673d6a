"""Fit torch's number of threads to the CPUs that this process may use.

By default torch starts a thread for each physical core. A quota (``docker run --cpus=4``, a Kubernetes limit) grants
CPU time for each period. Too many threads use up that time early. Then all threads, even the server's event loop, stand
still until the period ends."""

import os

import torch

from dlinfer.vendor.cpu.host.cpus import usable_cpus


def fit_threads() -> None:
    """Lower torch's number of threads to the number that can run at once, unless the user has chosen a number.

    ``OMP_NUM_THREADS``, ``MKL_NUM_THREADS`` and ``torch.set_num_threads`` are the user's choice. A number that equals
    torch's default does not count as chosen."""
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return
    cpus, threads = usable_cpus(), torch.get_num_threads()
    is_default = threads in (cpus.cores, len(cpus.logical), cpus.machine)
    if is_default and threads > cpus.threads:
        torch.set_num_threads(cpus.threads)
