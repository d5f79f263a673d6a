"""What is refused before it costs anything: folders, models, options and requests."""
