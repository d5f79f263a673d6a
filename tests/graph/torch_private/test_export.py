"""What an exported program says of its inputs and outputs."""

import torch

from dlinfer.graph.torch_private import export, symbols


def test_an_export_whose_writes_are_outputs_is_told_apart():
    class Counts(torch.nn.Module):
        seen: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1)
            return x + self.seen

    exported = torch.export.export(Counts(), (torch.ones(2),))
    assert export.export_gives_results_only(exported)
    assert not export.export_gives_results_only(exported.run_decompositions())


def test_kinds_of_an_exported_programs_inputs():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x, n):
            return x * self.weight * self.scale * torch.tensor([1.0, 2.0, 3.0])

    dynamic = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "n": None}
    exported = torch.export.export(Model(), (torch.ones(4, 3), 7), dynamic_shapes=dynamic)
    kinds = export.export_kinds(exported)
    assert sorted(kind for kind, _, _ in kinds).count("user") == 2
    assert {"weight", "scale"} <= {target for kind, target, _ in kinds if kind != "user"}
    assert 7 in [constant for _, _, constant in kinds]
    (x,) = [n for n in exported.graph.find_nodes(op="placeholder") if n.name == "x"]
    assert symbols.size_range(x.meta["val"].shape[0]) == (2, 64)
    assert symbols.size_range(3) == symbols.lowest_size(3) == 3
    assert symbols.lowest_size(x.meta["val"].shape[0]) == 2
