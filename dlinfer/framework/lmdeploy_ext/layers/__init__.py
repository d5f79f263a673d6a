"""The layers of LMDeploy's models. LMDeploy builds each from a BuildSpec. They compute with ``dlinfer.ops``."""
