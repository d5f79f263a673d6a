"""The keys of a model_config, from MindIE's documentation and from its published ``ModelConfig``."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _flag(value: Any) -> Any:
    """Convert a flag to a bool. MindIE's flags may be text: "true", "1", "false" and "0", in any case."""
    text = str(value).lower() if isinstance(value, (str, int)) else ""
    return text in ("true", "1") if text in ("true", "false", "1", "0") else value


def _number(value: Any) -> Any:
    """Raise an error for a bool in place of a number. Text is allowed, because MindIE also passes numbers as text."""
    if isinstance(value, bool):
        raise ValueError("a number, not a flag")
    return value


def _memory(value: float) -> float:
    """Raise an error for a memory size that is neither -1 nor above 0."""
    if value != -1 and not value > 0:
        raise ValueError("more than 0, or -1")
    return value


def _ends(value: Any) -> Any:
    """Parse eos_token_id if it is JSON text: a number or a list of numbers."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"JSON: {error}") from error


Flag = Annotated[bool, BeforeValidator(_flag), Field(strict=True)]
Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]
Memory = Annotated[float, BeforeValidator(_number), AfterValidator(_memory)]
Positive = Annotated[int, BeforeValidator(_number), Field(ge=1)]
Name = Annotated[
    str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]


class ModelConfig(BaseModel):
    """A checked model_config. Unknown keys are kept, because servers pass many, but have no effect.

    Memory is in GB (2**30 bytes), lengths in tokens. docs/vendors/mindie_config.md says what each key does.
    """

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=(), hide_input_in_errors=True)

    # Keys that MindIE's documentation calls required.
    model_id: Annotated[str, Field(min_length=1, description="folder of the model's weights")]
    backend_type: Annotated[
        Literal["atb", "torch"], Field(description="'atb' and 'torch' are this class; 'ms' is refused")
    ]
    world_size: Annotated[Whole, Field(ge=1, le=1048576, description="tensor parallel processes")]
    rank: Annotated[Whole, Field(ge=0, description="rank of this process, below world_size")]
    npu_device_id: Annotated[
        Whole, Field(ge=0, description="index of the device, below the number of visible devices")
    ]
    local_rank: Annotated[
        Whole, Field(ge=0, description="rank of this process on its machine, below world_size")
    ]
    num_threads: Annotated[Positive, Field(le=1024, description="threads for post-processing")] = 8
    trust_remote_code: Annotated[
        Flag, Field(description="whether to run Python code in the weights' folder, which you have to trust")
    ] = False

    # Keys that MindIE's documentation calls optional.
    model_name: Annotated[
        Name | None, Field(description="letters, digits and -._ with a letter or digit at both ends")
    ] = None
    inference_mode: Annotated[Any, Field(description="no effect: for MindIE's plugins")] = None
    max_position_embeddings: Annotated[
        Positive | None, Field(description="the longest sequence; replaces the checkpoint's value")
    ] = None
    load_tokenizer: Annotated[Flag, Field(description="whether to load a tokenizer")] = True
    tokenizer_path: Annotated[str | None, Field(description="folder of the tokenizer; None is model_id")] = (
        None
    )

    # Memory and lengths: required in MindIE's published dataclass, optional here.
    block_size: Annotated[Positive, Field(le=1024, description="slots in a KV block")] = 128
    npu_mem: Annotated[
        Memory, Field(description="GB of KV blocks on the device; -1 sizes it by max_batch_size")
    ] = -1
    cpu_mem: Annotated[Real, Field(ge=0, description="GB of KV blocks on the host, for swapping")] = 0
    max_input_len: Annotated[Positive, Field(description="tokens of a prompt, for warm_up")] = 2048
    max_iter_times: Annotated[Positive, Field(description="tokens of an answer, for warm_up")] = 2560
    max_prefill_tokens: Annotated[Positive, Field(description="tokens of a step's prompts, for warm_up")] = (
        4096
    )
    max_seq_len: Annotated[Positive, Field(description="tokens of a prompt and its answer")] = 2560
    max_batch_size: Annotated[Whole, Field(ge=0, description="sequences of a step; 0 is no limit")] = 0
    max_prefill_batch_size: Annotated[Whole, Field(ge=0, description="no effect; max_batch_size applies")] = 0

    # End tokens, and defaults of sampling parameters.
    ignore_eos: Annotated[Flag, Field(description="whether requests go on after an end token by default")] = (
        False
    )
    bos_token_id: Annotated[Whole | None, Field(ge=0, description="no effect")] = None
    eos_token_id: Annotated[
        Whole | list[Whole] | None,
        BeforeValidator(_ends),
        Field(description="tokens that end a text; replaces the checkpoint's"),
    ] = None
    pad_token_id: Annotated[Whole | None, Field(ge=-1, description="no effect")] = None
    repetition_penalty: Annotated[Real | None, Field(gt=0, description="default for requests")] = None
    frequency_penalty: Annotated[Real | None, Field(description="default for requests")] = None
    presence_penalty: Annotated[Real | None, Field(description="default for requests")] = None
    temperature: Annotated[Real | None, Field(ge=0, description="default for requests; 0 is greedy")] = None
    top_k: Annotated[Whole | None, Field(ge=0, description="default for requests; 0 is off")] = None
    top_p: Annotated[Real | None, Field(ge=0, le=1, description="default for requests; 1 is off")] = None
    do_sample: Annotated[Flag | None, Field(description="default for requests")] = None

    # Adapters.
    max_loras: Annotated[Whole, Field(ge=0, description="LoRA adapters at a time; 0 is none")] = 0
    max_lora_rank: Annotated[Whole, Field(ge=0, description="the largest rank of an adapter")] = 0

    # dlinfer's own keys.
    eager_mode: Annotated[Flag, Field(description="warm_up compiles nothing")] = False
