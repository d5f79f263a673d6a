"""Draw each sequence's next token by its own text and rules alone, whatever other sequences are in the batch.

Input: LMDeploy's logits and sampling inputs. Output: the same tokens whether a sequence runs alone, with others, in
chunks or after a preemption.
"""
