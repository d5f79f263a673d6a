"""The model of a generator with its tokenizer and configs. Attributes have the names of MindIE's ``model_wrapper``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dlinfer.errors import UnsupportedFeatureError
from dlinfer.framework.mindie_ext.adapters import AdapterManager
from dlinfer.framework.mindie_ext.config import ModelConfig
from dlinfer.framework.mindie_ext.errors import GeneratorCallError
from dlinfer.framework.mindie_ext.model.checks import Forward, check_forward
from dlinfer.framework.mindie_ext.model.compiled import CompiledModel
from dlinfer.framework.mindie_ext.model.model_info import model_info
from dlinfer.framework.mindie_ext.model.paged_model import PagedModel
from dlinfer.framework.mindie_ext.parallel import Group, load
from dlinfer.framework.transformers_ext import Pages, optimize, register_attention
from dlinfer.vendor import discovery


def generator_device(npu_device_id: int) -> torch.device:
    """Return the device of a rank: NPU number ``npu_device_id`` if a vendor serves NPUs here, else the CPU."""
    for vendor in discovery.loadable():
        if (
            vendor.device_type == "npu"
            and vendor.load_device is not None
            and discovery.probe(vendor).available
        ):
            return torch.device("npu", npu_device_id)
    return torch.device("cpu")


class ModelWrapper:
    """A Hugging Face model, loaded from safetensors onto a device, with its tokenizer.

    tokenizer: None if load_tokenizer is false.
    adapter_manager: the LoRA adapters.
    config, config_dict: the Hugging Face config, as an object and as a dict.
    model_info: sizes for the KV pool.
    max_position_embeddings: the largest number of tokens in a sequence.
    vocab_size: all token ids are below it.
    eos_token_ids: the tokens that end a text.
    optimization: which modules run on fused ops.
    """

    def __init__(self, config: ModelConfig, group: Group | None) -> None:
        from transformers import AutoConfig, AutoTokenizer

        self.rank = config.rank
        self.group = group
        self.device = generator_device(config.npu_device_id)
        self.model_id = config.model_id
        self.model_name = config.model_name
        remote = config.trust_remote_code
        hf_config = AutoConfig.from_pretrained(
            config.model_id, trust_remote_code=remote, local_files_only=True
        )
        model_info(
            hf_config, self.device, torch.float32, config.world_size
        )  # refuse the model before its weights are read
        self.tokenizer: Any = None
        if config.load_tokenizer:
            path = config.tokenizer_path or config.model_id
            self.tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=remote, local_files_only=True
            )
        register_attention()
        model: Any = load(
            config.model_id,
            dtype="auto",
            attn_implementation="dlinfer_paged",
            group=group,
            trust_remote_code=remote,
        )
        model = model.to(self.device).eval().requires_grad_(False)
        self.config = model.config
        self.config_dict: dict[str, Any] = self.config.to_dict()
        text = self.config.get_text_config(decoder=True)
        self.vocab_size: int = text.vocab_size
        self.max_position_embeddings = config.max_position_embeddings or getattr(
            text, "max_position_embeddings", None
        )
        self.model_info = model_info(self.config, self.device, model.dtype, config.world_size)
        self.eos_token_ids = _ends(model, self.tokenizer, config.eos_token_id)
        self.optimization = optimize(model)
        self.compiled = CompiledModel(PagedModel(model))
        longest = max(config.max_prefill_tokens, config.max_seq_len)
        self.adapter_manager = AdapterManager(model, config.max_loras, config.max_lora_rank, longest)
        self._adapters_version = 0

    def make_context(self, conversation: list[dict[str, str]], **kwargs: Any) -> list[int]:
        """Apply the tokenizer's chat template to a conversation, and return the token ids.

        kwargs: further arguments of ``apply_chat_template``. Raises UnsupportedFeatureError without a tokenizer or a
        template.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise UnsupportedFeatureError(
                feature="build_inputs without "
                + ("a chat template" if self.tokenizer is not None else "a tokenizer"),
                where="dlinfer's GeneratorTorch",
                advice="set load_tokenizer, and use a tokenizer with a chat template",
            )
        arguments: dict[str, Any] = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": False,
        } | kwargs
        return list(self.tokenizer.apply_chat_template(conversation, **arguments))

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
        q_lens: Tensor | None = None,
        adapter_ids: list[str | None] | None = None,
        block_size: int = 0,
        **kwargs: Any,
    ) -> Tensor:
        """Return the logits of packed tokens. ``GeneratorTorch.forward_tensor`` describes the arguments."""
        if kwargs:
            raise GeneratorCallError(
                call="forward_tensor",
                argument=min(kwargs),
                expected="no further arguments except q_lens and adapter_ids",
                given=sorted(kwargs),
            )
        forward = Forward(
            input_ids, position_ids, block_tables, slots, input_lengths, q_lens, lm_head_indices
        )
        forward = check_forward(forward, kv_cache, is_prefill, block_size, self.model_info, self.vocab_size)
        assert forward.position_ids is not None
        assert forward.q_lens is not None
        assert forward.rows is not None
        pages = Pages(
            caches=kv_cache,
            slots=forward.slots,
            block_tables=forward.block_tables,
            q_ends=forward.q_lens.cumsum(0),
            kv_seqlens=forward.input_lengths,
            block_size=block_size,
            is_decode=not is_prefill,
        )
        names = self.adapter_manager.preprocess_adapter_ids(adapter_ids, self.model_name, self.model_id)
        if (
            self.adapter_manager.version != self._adapters_version
        ):  # the graphs were compiled with other layers
            self.compiled.forget()
            self._adapters_version = self.adapter_manager.version
        with self.adapter_manager.activate(names, forward.q_lens.tolist()), self._watched():
            return self.compiled(forward.input_ids, forward.position_ids, forward.rows, pages)

    def _watched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.group is None else self.group.watched("a forward ran")


def _ends(model: Any, tokenizer: Any, chosen: Any) -> frozenset[int]:
    """Return the tokens that end a text: ``chosen``, or if that is None, the checkpoint's and the tokenizer's."""
    end_ids = chosen
    if end_ids is None:
        end_ids = getattr(model.generation_config, "eos_token_id", None)
        if end_ids is None:
            end_ids = getattr(model.config, "eos_token_id", None)
    ids = set(end_ids) if isinstance(end_ids, (list, tuple)) else {end_ids}
    if chosen is None and tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(int(token) for token in ids if token is not None)
