"""Questions that are asked inside Dynamo's call of a backend."""

import torch

from dlinfer.graph.torch_private import dynamo, fake_mode


def asked_in_backend(question, function, *args):
    """What ``question`` answers inside Dynamo's call of a backend."""
    answers = []

    def backend(graph_module, example_inputs):
        answers.append(question())
        return graph_module.forward

    dynamo.compile_apart(function, backend, True)(*args)
    (answer,) = answers
    return answer


def dynamo_mode() -> fake_mode.FakeTensorMode:
    mode = dynamo.dynamo_fake_mode()
    assert mode is not None
    return mode


def tall(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 3 else x
