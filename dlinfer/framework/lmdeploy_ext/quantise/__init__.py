"""Quantises a floating-point checkpoint to a format that LMDeploy reads, by rounding each number to the nearest.

Input: a folder in Hugging Face format, and the name of a format. Output: a new folder and a report. Only calibration
and measuring the loss need text and build the model.
"""
