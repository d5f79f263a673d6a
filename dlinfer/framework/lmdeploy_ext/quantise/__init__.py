"""Quantises a checkpoint in floats to one that LMDeploy reads, by rounding each number to the nearest.

Takes a folder in Hugging Face format and a format; writes a folder and returns a report. It needs no data and builds no
model, except for calibration and for measuring the loss.
"""
