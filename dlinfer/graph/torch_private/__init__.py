"""Every private name of torch that dlinfer needs, one file a subsystem.

In come torch's objects, out come the same or plain data. Anybody may call; nobody else names a private part of torch.
``tests/graph/torch_private`` uses each function, so a release of torch that changes one fails there first.
"""
