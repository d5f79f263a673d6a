"""The CPUs and memory that the kernel and cgroups allow this process. Standard library only."""
