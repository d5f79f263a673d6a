"""The vendor's own torch_npu without its driver: what its binaries declare can be read where no card is."""
