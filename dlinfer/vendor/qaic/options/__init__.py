"""The options of a Session: one option, the table of all options, one Session's options, and a YAML file of options."""
