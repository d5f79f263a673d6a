"""Every private name of torch that dlinfer needs, with one file for each subsystem of torch.

The other folders call these functions and name no private part of torch themselves. ``tests/graph/torch_private`` uses
each function. If a release of torch changes a private name, these tests fail first.
"""
