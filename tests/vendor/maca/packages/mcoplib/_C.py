"""Importing it registers the ops of ``torch.ops._C`` and ``torch.ops._C_cache_ops``, as mcoplib's binary does."""

from tests.vendor.maca.simulated_card import calling, products, rows

calling.register("_C", {**vars(rows), **vars(products)})
calling.register("_C_cache_ops", vars(rows))
