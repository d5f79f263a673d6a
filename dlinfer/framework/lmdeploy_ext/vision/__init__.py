"""Serve images: preprocess them without torchvision, correct LMDeploy's vision models, and run these as graphs.

The code changes LMDeploy's functions and models so that answers are as in transformers. Layers are in ``layers``.
"""
