"""Images: preprocessing without torchvision, corrections of LMDeploy's vision models, and their parts as graphs.

Takes LMDeploy's functions and models; returns the same with transformers' answers. Layers are in ``layers``.
"""
