"""The MindIE adaptor: ``GeneratorTorch``, a generator that third-party servers call, on dlinfer's ops.

Names follow MindIE-LLM's ``mindie_llm.text_generator``. docs/vendors/mindie.md lists the supported parts.
"""

from dlinfer.framework.mindie_ext.batch import (
    FinishReason,
    GenerationOutput,
    GenerationParams,
    InputMetadata,
    ModelInput,
    Request,
)
from dlinfer.framework.mindie_ext.cache import CachePool, KVCacheSettings
from dlinfer.framework.mindie_ext.config import ModelConfig, check_model_config
from dlinfer.framework.mindie_ext.generation import WarmupParams
from dlinfer.framework.mindie_ext.generator_backend import GeneratorBackend
from dlinfer.framework.mindie_ext.generator_torch import GeneratorTorch
from dlinfer.framework.mindie_ext.sampling import SamplingMetadata, SamplingOutput

__all__ = [
    "CachePool",
    "FinishReason",
    "GenerationOutput",
    "GenerationParams",
    "GeneratorBackend",
    "GeneratorTorch",
    "InputMetadata",
    "KVCacheSettings",
    "ModelConfig",
    "ModelInput",
    "Request",
    "SamplingMetadata",
    "SamplingOutput",
    "WarmupParams",
    "check_model_config",
]
