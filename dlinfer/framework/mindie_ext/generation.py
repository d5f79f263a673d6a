"""The steps of generation: compute the next tokens of a server's requests, as MindIE's class ``Generator`` does."""

import threading
from collections.abc import Sequence as Several
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dlinfer.framework.mindie_ext.batch import GenerationOutput, InputMetadata, ModelInput, Request
from dlinfer.framework.mindie_ext.batch.compose import Limits, Step, compose
from dlinfer.framework.mindie_ext.batch.context import SequenceStore
from dlinfer.framework.mindie_ext.batch.drawing import metadata_of
from dlinfer.framework.mindie_ext.batch.outcome import outcome
from dlinfer.framework.mindie_ext.cache.settings import GB
from dlinfer.framework.mindie_ext.errors import GeneratorCallError
from dlinfer.framework.mindie_ext.sampling import DEFAULT_SAMPLING_PARAMS

if TYPE_CHECKING:
    from dlinfer.framework.mindie_ext.cache import CachePool
    from dlinfer.framework.mindie_ext.config import ModelConfig
    from dlinfer.framework.mindie_ext.model.model_wrapper import ModelWrapper
    from dlinfer.framework.mindie_ext.parallel import Group


@dataclass(frozen=True)
class WarmupParams:
    """The lengths that ``warm_up`` uses, in tokens. All are at least 1."""

    max_prefill_tokens: int = 4096
    max_seq_len: int = 2560
    max_input_len: int = 1
    max_iter_times: int = 2560

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value <= 0:
                raise GeneratorCallError(
                    call="WarmupParams", argument=field.name, expected="a positive number", given=value
                )


class Generation:
    """A mixin with the methods that a server calls for each step.

    ``GeneratorBackend`` adds the model and the sampler.
    """

    if TYPE_CHECKING:
        config: ModelConfig
        model_wrapper: ModelWrapper
        group: Group | None
        tokenizer: Any
        device: torch.device
        lock: threading.RLock

        def pool(self, call: str) -> CachePool: ...
        def forward(self, model_inputs: Any, **kwargs: Any) -> Tensor: ...
        def sample(
            self, logits: Tensor, sampling_metadata: Any = None, sampling_param: Any = None, **kwargs: Any
        ) -> Any: ...
        def swap_cache(self, swap_decision: Any) -> None: ...

    store: SequenceStore

    def begin(self) -> None:
        self.store = SequenceStore()

    @property
    def max_seq_len(self) -> int:
        """The most tokens of a sequence: the config's max_seq_len or the model's limit, the lower of the two."""
        longest = self.model_wrapper.max_position_embeddings
        allowed = self.config.max_seq_len
        return min(limit for limit in (allowed, longest) if limit is not None)

    def generate_token(self, input_metadata: InputMetadata, warmup: bool = False) -> GenerationOutput:
        """Run one step of all requests of the batch: forward, sampling, and the decision whether each sequence ends.

        The forward writes keys and values into the KV pool, at the slots of the new tokens. The generator keeps the
        states of the sequences until ``clear_cache``. With ``warmup``, it keeps no new state. If the step raises, the
        server may send the step again.

        Raises GeneratorCallError, SamplingError, PoolMissingError, RankLostError.
        """
        with self.lock:
            settings = self.pool("generate_token").kvcache_settings
            limits = Limits(
                block_size=settings.block_size,
                blocks=settings.num_npu_blocks,
                max_seq_len=self.max_seq_len,
                max_batch_size=self.config.max_batch_size or 0,
                vocab_size=self.model_wrapper.vocab_size,
                ignore_eos=self.config.ignore_eos,
            )
            step = compose(input_metadata, self.store, limits)
            if self.tokenizer is None and any(state.stop_strings for state in step.states):
                raise GeneratorCallError(
                    call="generate_token",
                    argument="stop_strings",
                    expected="none without a tokenizer",
                    given="some",
                )
            if not step.draws:  # no request gets a token, but the forward must still fill the pool
                step.model_input.prefill_head_indices = np.zeros(1, dtype=np.int64)
            logits = self.forward(step.model_input)
            sampled = None
            if step.draws:
                sampling = metadata_of(
                    input_metadata, step, limits.vocab_size, self._sampling_defaults(), self._to_tensor
                )
                sampled = self.sample(logits, sampling)
                if self.group is not None:
                    sampled.token_ids = self.group.broadcast(sampled.token_ids)
            output = outcome(
                input_metadata,
                step,
                sampled,
                self.model_wrapper.eos_token_ids,
                self.max_seq_len,
                self.tokenizer,
            )
            if not warmup:
                self._remember(input_metadata, step)
            return output

    def generate(self, requests: Several[Request], is_prefill: bool = False) -> GenerationOutput:
        """Run one step: a prefill of all requests, or a decode of all requests."""
        block_size = self.pool("generate").kvcache_settings.block_size
        return self.generate_token(InputMetadata.from_requests(requests, None, is_prefill, block_size))

    def prefill(self, requests: Several[Request]) -> GenerationOutput:
        """Prefill the requests and return their first tokens."""
        return self.generate(requests, is_prefill=True)

    def decode(self, requests: Several[Request]) -> GenerationOutput:
        """Return the next token of each request. All requests must have been prefilled."""
        return self.generate(requests, is_prefill=False)

    def generate_mix(self, requests: Several[Request], is_prefill_batch: np.ndarray) -> GenerationOutput:
        """Run one step that prefills some requests, in whole or in part, and decodes the others.

        is_prefill_batch: [requests] bool. True: the step computes the request's tokens from split_start_position to
            split_end_position, and samples a token if the request's last_prompt is set. False: the step decodes.
        """
        flags = np.asarray(is_prefill_batch, dtype=bool)
        block_size = self.pool("generate_mix").kvcache_settings.block_size
        for request, prefill in zip(requests, flags.tolist(), strict=False):
            if not prefill:  # a decode computes one token, whatever the split positions are
                request.split_start_position, request.split_end_position, request.last_prompt = 0, 1, True
        return self.generate_token(InputMetadata.from_requests(requests, None, flags, block_size))

    def warm_up(self, warmup_params: WarmupParams | None = None) -> float:
        """Compile one graph for prefill and one for decode. Later steps of any size then need no compilation.

        Nothing is written into the pool. Returns the size of the pool's device blocks in GB (2**30 bytes).

        If world_size > 1 or the config sets eager_mode, nothing is compiled: one prefill and one decode run in eager
        mode.
        """
        params = warmup_params or WarmupParams()
        with self.lock:
            settings = self.pool("warm_up").kvcache_settings
            self.model_wrapper.compiled.graph = self.group is None and not self.config.eager_mode
            longest = min(params.max_input_len, params.max_prefill_tokens, self.max_seq_len)
            for length, is_prefill in ((max(longest, 2), True), (1, False)):
                self.forward(
                    _nothing_written(length, is_prefill, settings.block_size, settings.num_npu_blocks)
                )
            return settings.num_npu_blocks * settings.cache_block_bytes / GB

    def swap(self, block_operation: Any) -> None:
        """Copy blocks between device and host.

        block_operation: a list whose first element is the list of moves, as MindIE's scheduler sends it.
        """
        self.swap_cache(np.asarray(block_operation)[0])

    def load_lora(self, lora_name: str, lora_path: str) -> None:
        """Load a LoRA adapter from a folder that PEFT saved.

        Requests may then pass ``lora_name`` as their adapter_id.
        """
        with self.lock:
            self.model_wrapper.adapter_manager.load_adapter({lora_name: lora_path})

    def unload_lora(self, lora_name: str) -> None:
        """Unload a LoRA adapter. Raises AdapterError if no adapter of this name is loaded."""
        with self.lock:
            self.model_wrapper.adapter_manager.unload_adapter(lora_name)

    def _sampling_defaults(self) -> dict[str, float]:
        """Return the config's sampling parameters. They apply to requests without sampling parameters."""
        names = set(DEFAULT_SAMPLING_PARAMS) & set(type(self.config).model_fields)
        chosen = {name: getattr(self.config, name) for name in names}
        return {name: value for name, value in chosen.items() if value is not None}

    def _to_tensor(self, data: Any) -> Tensor:
        return torch.as_tensor(data).to(self.device)

    def _remember(self, metadata: InputMetadata, step: Step) -> None:
        for index, sequence_id in enumerate(metadata.all_sequence_ids.tolist()):
            self.store.put(sequence_id, step.states[index])


def _nothing_written(length: int, is_prefill: bool, block_size: int, blocks: int) -> ModelInput:
    """Return the input of a warm-up forward with one sequence.

    Its slots are -1, so no token is written into the pool.
    """
    ends = np.asarray([length], dtype=np.int64)
    needed = -(-length // block_size)
    return ModelInput(
        input_ids=np.zeros(length, dtype=np.int64),
        position_ids=np.arange(length, dtype=np.int64),
        block_tables=(np.arange(needed) % blocks)[None].astype(np.int32),
        slots=np.full(length, -1, dtype=np.int64),
        context_length=ends,
        max_seq_len=length,
        prefill_head_indices=ends - 1,
        is_prefill=is_prefill,
        query_length=ends,
    )
