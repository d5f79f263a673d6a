"""``python -m examples.tiny_models FAMILY OUT [--seed N] [--dtype float32|bfloat16]``."""

from .build import main

main()
