"""Draws each sequence's next token from that sequence alone: its own text, its own rules, and no state of a neighbour.

Input: LMDeploy's logits and sampling inputs. Output: the same tokens whether a sequence runs alone, beside others, in
chunks or after a preemption.
"""
