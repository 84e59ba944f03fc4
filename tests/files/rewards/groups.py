"""Score all answers to a task together; each returns something else than a list of numbers."""

import numpy


def array(prompt, responses, answer, metadata):
    return numpy.array([one == answer for one in responses])


def column(prompt, responses, answer, metadata):
    return numpy.array([[float(one == answer)] for one in responses])


def tensor(prompt, responses, answer, metadata):
    import torch

    return torch.tensor([float(one == answer) for one in responses])


def pairs(prompt, responses, answer, metadata):
    return ({"reward": float(one == answer), "length": len(one)} for one in responses)


def by_answer(prompt, responses, answer, metadata):
    return {one: float(one == answer) for one in responses}


def one_number(prompt, responses, answer, metadata):
    return 1.0
