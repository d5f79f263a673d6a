"""``python -m examples.trained_model OUT [--steps N]``."""

from .train import main

main()
