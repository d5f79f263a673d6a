"""The options of a Session: one option, the table of all options, a Session's own options, and YAML files."""
