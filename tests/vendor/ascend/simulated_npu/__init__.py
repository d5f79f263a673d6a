"""An NPU without silicon: the vendor's true schemas, and behind them what its documents say, in plain torch.

Its memory is the host's (tests/fake_device). An op refuses what the documents in torch_npu 2.13.0 do not admit: dtypes
(REG_OP in torchair's auto_generated_ge_raw_ops.py), shapes, contiguity, ranges of values (_op_plugin_docs.py); where
they are silent, it refuses empty tensors and gaps. What they leave undefined is filled with NaN or nonsense.

What it cannot show: the vendor's rounding, its speed, what its driver refuses beyond its documents, and where these are
wrong.
"""
