"""mcoplib's functions for LMDeploy, of which the kernels call one."""

from tests.vendor.maca.simulated_card import calling, rows

lmdeploy_rotary_embedding = calling.simulated("lmdeploy_rotary_embedding", rows.lmdeploy_rotary_embedding)
