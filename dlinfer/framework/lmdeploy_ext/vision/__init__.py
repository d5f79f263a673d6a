"""Serve images: preprocess them without torchvision, and correct and compile LMDeploy's vision models."""
