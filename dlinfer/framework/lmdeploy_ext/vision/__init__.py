"""Images: how LMDeploy's preprocessing works without torchvision, what its vision models get wrong, and which parts
of a model are language and which are vision.

In come LMDeploy's functions and models, out come the same with transformers' answers. Layers are in ``layers``.
"""
