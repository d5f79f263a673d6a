"""``GeneratorTorch``: the generator that third-party servers call."""

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dlinfer.framework.mindie_ext.batch import ModelInput
from dlinfer.framework.mindie_ext.cache import CachePool, KVCacheSettings
from dlinfer.framework.mindie_ext.cache.settings import GB
from dlinfer.framework.mindie_ext.cache.sizing import memory_of_blocks
from dlinfer.framework.mindie_ext.config import check_model_config
from dlinfer.framework.mindie_ext.errors import GeneratorCallError, PoolMissingError
from dlinfer.framework.mindie_ext.generation import Generation
from dlinfer.framework.mindie_ext.generator_backend import GeneratorBackend


class GeneratorTorch(Generation, GeneratorBackend):
    """The interface for third-party serving frameworks on the torch backend: forward and sampling over a KV pool.

    model_config: a mapping of MindIE's keys, which docs/vendors/mindie_config.md lists. The whole mapping is checked
        first. Then the model is loaded from safetensors and the KV pool is allocated.

    Attributes:
    cache_pool: the pool of KV blocks. tokenizer: None with ``load_tokenizer=False``. device: the device of the model.
    rank: the rank of this process; each of the world_size processes makes its own generator.
    adapter_manager: the LoRA adapters.

    Several threads may call the methods. A lock lets only one call run at a time.

    Raises ModelConfigError, MemoryPlanError, RankLostError, and UnsupportedFeatureError for a model or a feature that
    dlinfer does not serve.
    """

    cache_pool: CachePool | None = None

    def __init__(self, model_config: Mapping[str, Any]) -> None:
        config = check_model_config(model_config)
        super().__init__(config)
        self.tokenizer = self.model_wrapper.tokenizer
        self.device = self.model_wrapper.device
        self.rank = self.model_wrapper.rank
        self.adapter_manager = self.model_wrapper.adapter_manager
        self.lock = threading.RLock()
        self.begin()
        self.update_cache_policy(self.kvcache_settings())

    def kvcache_settings(self) -> KVCacheSettings:
        """Return the sizes of the KV pool for the config.

        If npu_mem is -1, the pool has room for max_batch_size sequences, up to a fixed share of the free device memory.
        """
        config = self.config
        npu_mem = config.npu_mem * GB
        if config.npu_mem == -1:
            npu_mem = memory_of_blocks(config, self.model_info, self.max_seq_len)
        return KVCacheSettings(
            rank=config.rank,
            model_info=self.model_info,
            cpu_mem=int(config.cpu_mem * GB),
            npu_mem=int(npu_mem),
            block_size=config.block_size,
            backend_type=config.backend_type,
        )

    def update_cache_policy(self, kvcache_settings: KVCacheSettings) -> None:
        """Replace the KV pool by a pool of other sizes. The contents of the old pool and all sequences are lost.

        Raises MemoryPlanError if memory is short. The generator then has no pool.
        """
        with self.lock:
            self.clear_kv_cache()
            pool = CachePool(kvcache_settings, self.device)
            pool.allocate_cpu_kvcache()
            pool.allocate_npu_kvcache()
            self.cache_pool = pool

    def clear_kv_cache(self) -> None:
        """Free the pool's memory and forget all sequences.

        Forwards raise PoolMissingError until ``update_cache_policy``.
        """
        with self.lock:
            self.model_wrapper.compiled.unbind()
            self.begin()
            self.cache_pool = None

    def to_tensor(self, data: Any) -> Tensor:
        """Return ``data`` as a tensor on the generator's device."""
        return torch.tensor(data, device=self.device)

    def forward(self, model_inputs: ModelInput, **kwargs: Any) -> Tensor:
        """Return the logits of a batch, [n, vocabulary].

        The n tokens are those in prefill_head_indices or, if that is None, all tokens. The keys and values of all
        tokens are written into the KV pool, at the tokens' slots.

        Raises GeneratorCallError before anything is written. Also raises PoolMissingError and RankLostError.
        """
        pool = self.pool("forward")
        adapter_ids = model_inputs.adapter_ids
        return self.forward_tensor(
            input_ids=self._whole(model_inputs.input_ids),
            position_ids=self._whole(model_inputs.position_ids),
            is_prefill=model_inputs.is_prefill,
            kv_cache=pool.npu_cache,
            block_tables=self._whole(model_inputs.block_tables),
            slots=self._whole(model_inputs.slots),
            input_lengths=self._whole(model_inputs.context_length),
            max_seq_len=model_inputs.max_seq_len,
            lm_head_indices=self._whole(model_inputs.prefill_head_indices),
            q_lens=self._whole(model_inputs.query_length),
            adapter_ids=adapter_ids,
            **kwargs,
        )

    def forward_tensor(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        is_prefill: bool,
        kv_cache: list[tuple[Tensor, Tensor]],
        block_tables: Tensor,
        slots: Tensor,
        input_lengths: Tensor,
        max_seq_len: int,
        lm_head_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the logits of packed tokens over a paged cache that the caller passes. Integers are int32 or int64.

        input_ids: [tokens].
        position_ids: [tokens]. None computes the positions from the lengths.
        is_prefill: whether any sequence has more than one new token.
        kv_cache: (keys, values) of each layer in the pool's layout. The tensors are mutated.
        block_tables: [sequences, blocks].
        slots: [tokens]. Tokens with a negative slot are not written.
        input_lengths: [sequences], the number of keys of each sequence, new keys included.
        max_seq_len: an upper bound of input_lengths.
        lm_head_indices: [n], the tokens of a prefill whose logits to return. None means all tokens.
        q_lens, in kwargs: [sequences], the number of new tokens of each sequence. None means input_lengths in a
            prefill, 1 in a decode.
        adapter_ids, in kwargs: the LoRA adapter of each sequence. None or "None" means the base model.

        Returns [n, vocabulary] in the model's dtype. Raises GeneratorCallError before anything is written.
        """
        adapter_ids = kwargs.get("adapter_ids")
        if adapter_ids is not None and len(adapter_ids) > len(input_lengths):
            raise GeneratorCallError(
                call="forward_tensor",
                argument="adapter_ids",
                expected=f"at most {len(input_lengths)}, one for each sequence",
                given=len(adapter_ids),
            )
        block_size = self.config.block_size
        if self.cache_pool is not None:
            block_size = self.cache_pool.kvcache_settings.block_size
        with self.lock:
            return self.model_wrapper.forward_tensor(
                input_ids=input_ids,
                position_ids=position_ids,
                is_prefill=is_prefill,
                kv_cache=kv_cache,
                block_tables=block_tables,
                slots=slots,
                input_lengths=input_lengths,
                max_seq_len=max_seq_len,
                lm_head_indices=lm_head_indices,
                block_size=block_size,
                **kwargs,
            )

    def swap_cache(self, swap_decision: Any) -> None:
        """Copy blocks between device and host: see ``CachePool.swap_kvcache_method``.

        swap_decision: [moves, 3] integers. A move is a direction, a source block and a target block. The direction is 0
            to the device, 1 to the host.

        Raises SwapError before any copy.
        """
        with self.lock:
            self.pool("swap_cache").swap_kvcache_method(swap_decision)

    def clear_cache(self, sequence_ids: Iterable[int]) -> int:
        """Forget these sequences: their tokens, and the sampler's state. The server manages their blocks.

        Returns 1, as MindIE's method does.
        """
        with self.lock:
            ids = [int(sequence_id) for sequence_id in sequence_ids]
            self.store.clear(ids)
            return super().clear_cache(ids)

    def pool(self, call: str) -> CachePool:
        """Return the KV pool. Raises PoolMissingError if there is none.

        call: the name of the method, for the error's text.
        """
        if self.cache_pool is None:
            raise PoolMissingError(call=call)
        return self.cache_pool

    def _whole(self, values: Any) -> Any:
        """Return integers, an array or a tensor, as a tensor on the device. None stays None."""
        return None if values is None else torch.as_tensor(values).to(self.device)
