"""What clients receive - text, stops, choices, tool calls - corrected where LMDeploy differs from its protocols.

Each file corrects one fault; ``refusals`` holds what is not served at all.
"""
