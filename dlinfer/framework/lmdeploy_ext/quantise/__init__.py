"""Quantises a floating-point checkpoint to a format that LMDeploy reads, by default by rounding to the nearest.

Input: a folder in Hugging Face format, and the name of a format. Output: a new folder and a report. Rounding to the
nearest reads the weights only. Calibrated rounding and the measurement of the loss also read a text and run the model.
"""
