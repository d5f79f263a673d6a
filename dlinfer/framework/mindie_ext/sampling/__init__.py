"""Sample tokens from logits: penalties, temperature, top_k and top_p, draws, log-probabilities."""

from dlinfer.framework.mindie_ext.sampling.deprecated import SamplingData, SamplingParam
from dlinfer.framework.mindie_ext.sampling.metadata import SamplingMetadata
from dlinfer.framework.mindie_ext.sampling.output import SamplingOutput
from dlinfer.framework.mindie_ext.sampling.parameters import DEFAULT_SAMPLING_PARAMS, SAMPLING_DTYPE
from dlinfer.framework.mindie_ext.sampling.sampler import Sampler

__all__ = [
    "DEFAULT_SAMPLING_PARAMS",
    "SAMPLING_DTYPE",
    "Sampler",
    "SamplingData",
    "SamplingMetadata",
    "SamplingOutput",
    "SamplingParam",
]
