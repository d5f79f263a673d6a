"""Serve images: preprocess them without torchvision, correct LMDeploy's vision models, and compile the vision models."""
