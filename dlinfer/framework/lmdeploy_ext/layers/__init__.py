"""The layers that LMDeploy builds its models from. Each takes LMDeploy's BuildSpec and computes by ``dlinfer.ops``."""
