"""What clients receive: text, stops, choices, tool calls and errors, corrected where LMDeploy's differ from its protocols.

Each file corrects one fault; ``refusals`` holds what is not served at all.
"""
