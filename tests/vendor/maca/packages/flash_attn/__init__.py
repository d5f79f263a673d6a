"""A stand-in of MetaX's flash_attn for tests."""

from tests.vendor.maca.simulated_card import attention, calling

flash_attn_varlen_func = calling.simulated("flash_attn_varlen_func", attention.flash_attn_varlen_func)
flash_attn_with_kvcache = calling.simulated("flash_attn_with_kvcache", attention.flash_attn_with_kvcache)
