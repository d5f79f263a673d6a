"""``dlinfer.explain``: reports of compilations as text, JSON and one HTML page.

In come reports, out come documents; nothing is compiled that the model's own call would not compile. Users and the
command line call it.
"""
