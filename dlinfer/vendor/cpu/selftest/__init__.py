"""The self-test of the C++ kernels: cases with known results, which run before a kernel is used on this CPU."""
