"""One step of a generator: the server's input, the step's output, and the state of each sequence between two steps."""

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
