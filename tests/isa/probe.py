"""What is in force in this process, as one line of JSON. Run with ONEDNN_VERBOSE=1, whose lines stand before."""

import json

import torch

from dlinfer.vendor.cpu import isa


def openvino_kernels() -> str:
    """What the CPU plugin generates for an elementary op, such as jit_avx2_f32; empty without the package."""
    try:
        import openvino as ov
        import openvino.opset16 as op
    except ImportError:
        return ""
    x = op.parameter([-1, 37], ov.Type.f32)
    # openvino's stubs give its Model two classes
    model = ov.Model([op.erf(op.exp(x)).output(0)], [x], "probe")  # pyright: ignore[reportGeneralTypeIssues]
    compiled = ov.Core().compile_model(model, "CPU")
    compiled([torch.ones(3, 37).numpy()])
    infos = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    kinds = {
        info["primitiveType"].astype(str) for info in infos if info["layerType"].astype(str) == "Eltwise"
    }
    return ", ".join(sorted(kinds)) or "fused"


if __name__ == "__main__":
    torch.ones(8, 8).to_mkldnn().to_dense()  # torch's oneDNN says its level when it is first used
    print(
        json.dumps(
            {
                "aten": torch.backends.cpu.get_cpu_capability(),
                "openvino": openvino_kernels(),
                "ours": " ".join(isa.flags()) or "-march=native",
            }
        )
    )
