"""The matrix: which model meets which engine options. A cell is one engine start.

What a cell asks is in ``cell_jobs.py``, what has to hold in ``cell_checks.py``.
"""

from dataclasses import dataclass
from typing import Any

from dlinfer.vendor import discovery
from examples.tiny_models import families
from examples.tiny_models.families import FAMILIES
from examples.tiny_models.vision_families import ALSO_TEXT

SEEDS = (0, 1, 2)

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {},
    "block16": {"block_size": 16},
    "block32": {"block_size": 32},
    "block128": {"block_size": 128},
    "chunked": {"max_prefill_token_num": 32},
    "prefix": {"enable_prefix_caching": True, "block_size": 16},
    "chunked-prefix": {"max_prefill_token_num": 32, "enable_prefix_caching": True, "block_size": 16},
}

# LMDeploy's default, and ``eager_mode=True``.
MODES = ("graph", "eager")

# Graph engines besides the cpu vendor's own; their cells run where a vendor of the name is registered.
ENGINES = ("openvino",)

# What strict cells run under: nothing may fall back to single kernels, nothing is left out as too small.
STRICT = {"DLINFER_FALLBACK": "error", "DLINFER_SMALL_REGIONS": "engine"}

# Tests compare only the tokens of these families, with fewer options than for the first ones.
BRIEF = {**families.BRIEF, **ALSO_TEXT}

# Prompts of the families in BRIEF: before and behind the original length of 64 tokens and the window of 16. The
# second outgrows the length while it is continued.
POSITION_LENGTHS = (3, 60, 70, 200, 600)
POSITION_CONFIGS = ("base", "chunked", "prefix")
# Whose two best scores are never close on these prompts, see FP32_DECISIVE. With seed 3 two of PhiMoE's experts score
# within 1e-7 of each other for one token, and float32's rounding chooses between them.
POSITION_SEEDS = {"llama_dynamic": 0, "internlm3": 2, "phimoe": 4}
POSITION_SEED = 3

# The family that meets the most configurations in the quick lane, and one with experts. An engine starts in a second
# in a process that has another; compiling graphs takes half a minute.
THOROUGH, EXPERTS = "qwen2", "mixtral"
QUICK = (
    (THOROUGH, "float32", "base", "graph", ""),
    (THOROUGH, "float32", "base", "graph", "openvino"),
    (THOROUGH, "float32", "base", "eager", ""),
    (THOROUGH, "float32", "chunked-prefix", "eager", ""),
    (THOROUGH, "bfloat16", "base", "eager", ""),
    (EXPERTS, "float32", "base", "eager", ""),
)


@dataclass(frozen=True)
class Cell:
    family: str
    seed: int
    dtype: str
    config: str
    mode: str = "graph"
    engine: str = ""

    @property
    def name(self) -> str:
        engine = f"-{self.engine}" if self.engine else ""
        return f"{self.family}-s{self.seed}-{self.dtype}-{self.config}-{self.mode}{engine}"

    @property
    def column(self) -> str:
        """Where the table of results has it."""
        return self.engine or (self.config if self.dtype == "float32" else "bf16")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the engine's process."""
        return {
            **({"DLINFER_ENGINE": self.engine} if self.engine else {}),
            **(STRICT if self.is_strict else {}),
        }

    @property
    def is_strict(self) -> bool:
        """Whether everything that computes has to be in the engine, or in a kernel of the vendor's: each family once
        in either mode, all of other engines, and all of ``make test``."""
        return bool(self.engine) or self.column == "base" or self.is_quick

    @property
    def missing(self) -> str:
        """Why the cell cannot run here; empty where it can."""
        there = not self.engine or self.engine in discovery.names()
        return "" if there else f"no vendor is registered for the engine {self.engine}"

    @property
    def is_quick(self) -> bool:
        """Part of ``make test``. Families of BRIEF are in ``test_brief_cells.py``, where all share a process."""
        return self.seed == 0 and (self.family, self.dtype, self.config, self.mode, self.engine) in QUICK


def cells() -> list[Cell]:
    """Every cell: all in float32, and the dense families in bfloat16 without further options.

    Of engines besides the cpu vendor's own each family in float32, and one with other blocks and with longer prompts
    than one prefill takes; their vendors' kernels once more in eager mode.
    """
    fp32 = [Cell(f, s, "float32", c, m) for m in MODES for f in FAMILIES for s in SEEDS for c in CONFIGS]
    dense = [family for family, spec in FAMILIES.items() if spec.dense]
    bf16 = [Cell(f, s, "bfloat16", "base", m) for m in MODES for f in dense for s in SEEDS]
    own = [Cell(f, s, "float32", "base", engine=e) for e in ENGINES for f in FAMILIES for s in SEEDS]
    thorough = [Cell(THOROUGH, 0, "float32", c, engine=e) for e in ENGINES for c in ("block128", "chunked")]
    eager = [Cell(THOROUGH, 0, "float32", "base", "eager", e) for e in ENGINES]
    return fp32 + bf16 + own + thorough + eager + brief_cells()


def brief_cells() -> list[Cell]:
    """Families of BRIEF in float32: alone, with prompts in chunks, and with blocks that texts share."""
    return [
        Cell(family, POSITION_SEEDS.get(family, POSITION_SEED), "float32", config, mode)
        for mode in MODES
        for family in BRIEF
        for config in POSITION_CONFIGS
    ]
