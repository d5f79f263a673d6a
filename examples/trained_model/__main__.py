"""``python -m examples.trained_model OUT [--steps N | --zen]``."""

from .train import main

main()
