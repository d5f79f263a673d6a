"""The layers that LMDeploy puts into its models. Each is built from a BuildSpec and computes with ``dlinfer.ops``."""
