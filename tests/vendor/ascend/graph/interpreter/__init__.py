"""An interpreter of GE graphs in plain torch, stricter than lax.

It reads the protobuf message that torchair hands to the card's engine. An op type that it does not know, an input or an
attribute that an op does not have, a missing one, and a result of another dtype or size than torchair noted, are
errors. What an op of torch_npu computes, and what its documents admit, is said once, in ``simulated_npu``.
"""
