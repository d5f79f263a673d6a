"""The ISA levels that can be forced from outside, as data: the variables, and what the CPU must have for them.

oneDNN reads its variable in torch and in OpenVINO, whose CPU plugin takes it for its own generated code too. ATen takes
a level that the CPU has not at its word, and the process ends; so what the CPU has is looked up, not tried. Of our own
levels some are models, which compute in software what a CPU lacks.
"""

from dataclasses import dataclass

from dlinfer.vendor.cpu import isa

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Level:
    """variable=value, and the flags (as Linux lists them) of a CPU on which it is more than a wish."""

    variable: str
    value: str
    needs: tuple[str, ...]

    @property
    def name(self) -> str:
        """As one writes it into the environment."""
        return f"{self.variable}={self.value}"

    @property
    def is_model(self) -> bool:
        """Whether software computes what its instructions do."""
        return self.variable == "DLINFER_CPU_ISA" and isa.is_model(self.value)


ONEDNN = {
    "SSE41": ("sse4_1",),
    "AVX": ("avx",),
    "AVX2": ("avx2", "fma"),
    "AVX2_VNNI": ("avx_vnni",),
    "AVX2_VNNI_2": ("avx_vnni_int8", "avx_ne_convert"),
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": (*_AVX512, "avx512_vnni"),
    "AVX512_CORE_BF16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "AVX512_CORE_FP16": (*_AVX512, "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    "AVX512_CORE_AMX": (*_AVX512, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    "AVX512_CORE_AMX_FP16": (*_AVX512, "avx512_bf16", "amx_tile", "amx_fp16"),
}
ATEN = {"default": (), "avx2": ("avx2", "fma", "f16c"), "avx512": (*_AVX512, "fma")}

LEVELS = (
    *(Level("ONEDNN_MAX_CPU_ISA", value, needs) for value, needs in ONEDNN.items()),
    *(Level("ATEN_CPU_CAPABILITY", value, needs) for value, needs in ATEN.items()),
    *(Level("DLINFER_CPU_ISA", value, needs) for value, needs in isa.NEEDS.items()),
)
