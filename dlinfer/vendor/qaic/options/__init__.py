"""The options of a Session: one option, the table of all, those of one Session, and a file of them."""
