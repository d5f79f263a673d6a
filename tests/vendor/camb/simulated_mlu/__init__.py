"""An MLU without silicon: the vendor's published signatures, and behind them what its documents say, in plain torch.

Its memory is the host's (``dlinfer.conformance.stand_in``). A function binds its arguments as the golden signature
does, wants the annotated types, and refuses what the docstrings of torch_mlu_ops 1.12.1 do not admit: dtypes, shapes,
sizes; where they say nothing of strides it wants none, and of empty tensors none. What they leave undefined is NaN or
nonsense.

What it cannot show: the vendor's rounding and speed, what its driver refuses beyond the documents, and where these are
wrong.
"""
