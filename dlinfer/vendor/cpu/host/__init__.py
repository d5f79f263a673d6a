"""The CPUs and memory that this process may use, by the kernel and its cgroups. Standard library only."""
