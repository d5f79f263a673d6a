"""``GeneratorBackend``: sampling and tokenization, like MindIE's class of this name."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from dlinfer.framework.mindie_ext.config import ModelConfig
from dlinfer.framework.mindie_ext.errors import SamplingError
from dlinfer.framework.mindie_ext.model.model_wrapper import ModelWrapper, generator_device
from dlinfer.framework.mindie_ext.parallel import Group, join
from dlinfer.framework.mindie_ext.sampling import (
    Sampler,
    SamplingData,
    SamplingMetadata,
    SamplingOutput,
    SamplingParam,
)


class GeneratorBackend:
    """Owns the model and the sampler. This is a base class: use ``GeneratorTorch``.

    config: the checked model_config. model_wrapper: the model. group: the ranks that share the model, or None.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.group: Group | None = None
        if config.world_size > 1:
            kind = generator_device(config.npu_device_id).type
            self.group = join(config.rank, config.world_size, kind)
        self.sampler = Sampler(config.num_threads)
        self.model_wrapper = ModelWrapper(config, self.group)
        self.model_info = self.model_wrapper.model_info
        self.max_position_embeddings = self.model_wrapper.max_position_embeddings
        self.init_sampler(sorted(self.model_wrapper.eos_token_ids))

    def init_sampler(self, eos_token_id: list[int]) -> None:
        """Set the sampler's device and the tokens that end a text."""
        self.sampler.initialize(self.model_wrapper.device, eos_token_id)

    def configure_sampler(self, sampling_metadata: SamplingMetadata) -> None:
        """Reset the random generator of each sequence in ``sampling_metadata`` to its seed."""
        self.sampler.configure(sampling_metadata)

    def sample(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata | SamplingData | None = None,
        sampling_param: SamplingParam | None = None,
        **kwargs: Any,
    ) -> SamplingOutput | tuple[np.ndarray, np.ndarray | None]:
        """Sample a token for each row of logits. The logits are not mutated.

        The key ``num_threads`` of ``model_config`` sets the number of threads.

        logits: [sequences, vocabulary], floating.
        sampling_metadata: the sampling parameters. None means greedy sampling.

        MindIE's deprecated form passes a SamplingData, as ``sampling_metadata`` or as the keyword ``sampling_data``,
        together with a ``sampling_param``.

        Returns a SamplingOutput or, in the deprecated form, (token ids, log-probabilities). Raises SamplingError.
        """
        data = (
            sampling_metadata if isinstance(sampling_metadata, SamplingData) else kwargs.get("sampling_data")
        )
        if data is not None:
            if sampling_param is None:
                expected = "a SamplingParam together with SamplingData"
                raise SamplingError(parameter="sampling_param", expected=expected, given=None)
            return self.sampler(
                logits, SamplingMetadata.from_deprecated(data, sampling_param)
            ).to_deprecated()
        assert not isinstance(sampling_metadata, SamplingData)
        return self.sampler(logits, sampling_metadata)

    def build_inputs(self, conversations: list[list[dict[str, str]]], **kwargs: Any) -> list[list[int]]:
        """Apply the chat template to each conversation and return the token ids.

        conversations: lists of messages {"role", "content"}.
        """
        return [self.model_wrapper.make_context(conversation, **kwargs) for conversation in conversations]

    def clear_cache(self, sequence_ids: Iterable[int]) -> int:
        """Remove the sampler's state of these sequences. Return 1, as MindIE's method does."""
        self.sampler.clear_cache(np.asarray(list(sequence_ids), dtype=np.int64))
        return 1
