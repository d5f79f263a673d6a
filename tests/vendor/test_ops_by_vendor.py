"""The table of ops by vendors says something of every kernel."""

import importlib

import pytest

from dlinfer.ops import registry
from dlinfer.vendor.claims import Proof
from docs.generate import ops_by_vendor


def test_every_level_is_explained():
    assert set(ops_by_vendor.MEANINGS) == set(Proof)


@pytest.mark.parametrize("vendor", ops_by_vendor.vendors(), ids=lambda vendor: vendor.name)
def test_every_kernel_has_a_level(vendor):
    """Kernels of dlinfer's own vendors stand in a module that loads without an SDK."""
    kernels = importlib.import_module(f"dlinfer.vendor.{vendor.name}.kernels").KERNELS
    assert vendor.proofs is not None
    proofs = vendor.proofs()
    assert set(proofs) == set(kernels)
    assert set(proofs) <= set(registry())
    assert set(proofs.values()) <= set(Proof)


def test_only_a_runtime_that_ran_here_is_real():
    for vendor in ops_by_vendor.vendors():
        assert vendor.proofs is not None
        real = Proof.RUNTIME in vendor.proofs().values()
        assert not real or vendor.probe().available, vendor.name
