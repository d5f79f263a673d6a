"""Small types shared with serving frameworks."""
