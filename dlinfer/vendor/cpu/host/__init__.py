"""What this process may use of the machine: CPUs and memory, as the kernel and its cgroups say. Standard library only."""
