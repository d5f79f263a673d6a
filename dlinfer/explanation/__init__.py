"""``dlinfer.explain``: reports of compilations as text, JSON and one HTML page."""
