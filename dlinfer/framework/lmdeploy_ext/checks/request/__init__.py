"""Checks of requests, and the HTTP errors that they become."""
