"""The self-test of the C++ kernels: cases with known results, run on this CPU before a kernel is used."""
