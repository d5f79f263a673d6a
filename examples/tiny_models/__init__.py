"""Tiny random-weight checkpoints in Hugging Face format, made offline.

``python -m examples.tiny_models qwen2 /tmp/qwen2`` from the project's root writes one. The demo and the
end-to-end tests build theirs here; no model hub is ever asked.
"""
