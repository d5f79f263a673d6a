"""A package of pytest's, so that the server which its tests share ends with the last of them."""
