"""Importing it registers the ops of ``torch.ops._moe_C``, as mcoplib's binary does."""

from tests.vendor.maca.simulated_card import calling, experts, interpreter

interpreter.mend()
calling.register("_moe_C", vars(experts))
