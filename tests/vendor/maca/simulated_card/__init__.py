"""A MetaX card without silicon: the published schemas, and behind them what the published sources do, in plain torch.

Its memory is the host's (``dlinfer.conformance.stand_in``). A function refuses what its source checks, and what it
reads without a check: dtypes behind pointers, gaps, sizes that run out of memory. Where its source says nothing of
empty tensors, they are refused.

torch calls the real device "cuda", a name that no other device of a torch may have, and a torch for the host has no
tensors of "cuda". Here it is called "maca", which the vendor takes for its device_type where torch has a backend of
that name; nothing else differs.

What it cannot show: rounding and speed of the card, what MetaX's build of flash_attn, of which no source is published,
does otherwise than flash-attention's documents say, and whether anything in torch or LMDeploy minds the name "cuda".
"""
