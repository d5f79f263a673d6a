"""What a server hands to a generator for one step, what it gets back, and what is remembered of each sequence."""

from dlinfer.framework.mindie_ext.batch.generation_output import FinishReason, GenerationOutput
from dlinfer.framework.mindie_ext.batch.input_metadata import InputMetadata
from dlinfer.framework.mindie_ext.batch.model_input import ModelInput
from dlinfer.framework.mindie_ext.batch.request import GenerationParams, Request, Sequence

__all__ = [
    "FinishReason",
    "GenerationOutput",
    "GenerationParams",
    "InputMetadata",
    "ModelInput",
    "Request",
    "Sequence",
]
