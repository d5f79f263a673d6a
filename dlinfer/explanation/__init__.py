"""``dlinfer.explain``: reports of compilations as text, JSON and one HTML page.

``explain`` compiles only what the model's own call would compile. Users and the command line call it.
"""
