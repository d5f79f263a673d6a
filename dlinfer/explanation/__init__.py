"""``dlinfer.explain``: reports of compilations as text, JSON and one HTML page.

It compiles nothing that the model's own call would not compile. Users and the command line call it.
"""
