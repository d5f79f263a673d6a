"""What is served: the layers and the graph runner that LMDeploy builds its models from.

In come LMDeploy's build specs, out come implementations on ``dlinfer.ops``. LMDeploy calls them through ``backend``.
"""
