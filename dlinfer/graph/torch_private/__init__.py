"""Every private name of torch that dlinfer needs, one file a subsystem.

The other rooms call these functions and name no private part of torch themselves.
``tests/graph/torch_private`` uses each function, so a release of torch that changes one fails there first.
"""
