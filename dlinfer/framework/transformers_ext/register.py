"""Register dlinfer's attention implementations with transformers."""

from dlinfer.framework.transformers_ext import attention, packed, paged


def register_attention() -> None:
    """Register ``attn_implementation="dlinfer"``, ``"dlinfer_packed"`` and ``"dlinfer_paged"``.

    A second call does nothing.

    ``dlinfer`` serves any model that uses transformers' AttentionInterface, with transformers' own caches and
    ``generate``. ``dlinfer_paged`` needs ``pages=`` in each call: see ``Pages``. ``dlinfer_packed`` needs
    ``packing=``: see ``Packing``.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(attention.NAME, attention.attention_forward)
    AttentionMaskInterface.register(attention.NAME, sdpa_mask)
    AttentionInterface.register(paged.NAME, paged.paged_attention_forward)
    AttentionInterface.register(packed.NAME, packed.packed_attention_forward)
