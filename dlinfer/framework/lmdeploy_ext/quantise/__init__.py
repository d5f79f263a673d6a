"""A checkpoint in floats becomes a quantised one that LMDeploy reads, by rounding each number to the nearest.

In come a folder as Hugging Face saves it and a format, out come a folder and a report. No data, and no model is built.
"""
