"""Serve images: preprocess them without torchvision, correct LMDeploy's vision models, and run these as graphs."""
