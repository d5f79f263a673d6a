"""Attention on npu_fused_infer_attention_score: prompts, prompts behind cached beginnings, decoding, sparse attention."""
