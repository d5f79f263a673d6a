"""The layers that LMDeploy builds its models from: takes its BuildSpecs, returns implementations on ``dlinfer.ops``."""
