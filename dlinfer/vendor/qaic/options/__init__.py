"""The options of a Session: one option, the table of all, a Session's options, and a file of them."""
