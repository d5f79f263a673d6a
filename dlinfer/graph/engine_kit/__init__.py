"""What graph engines stand on.

``value_engine`` is the whole of an engine but for what only its vendor knows: a vendor says what it takes, writes a
function in its own form, and compiles it. ``onnx_engine`` is that engine for vendors that are fed ONNX: two methods are
theirs. The rest are their parts, which an engine may use by themselves. docs/guides/write_an_engine.md builds one.
"""
