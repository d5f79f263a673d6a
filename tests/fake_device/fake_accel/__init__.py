"""A device that torch and dlinfer do not know, as its vendor would bring it: a torch device and a dlinfer vendor."""
