"""`algorithm.loss=path/file.py:function`: a user's own loss.

It is called for each micro-batch with those of these tensors that it has as parameters, all [sequences, length]:

    new         log-probabilities of the sampled tokens, by the policy that is trained; with a gradient
    old         the same before the first step (`algorithm.old_logprobs`): the denominator of a ratio
    engine      the same by the engine, when it sampled
    reference   the same by the reference policy; None without one (`algorithm.kl_coef`, `kl_in_reward`)
    entropy     of the distribution that each token was drawn from; with a gradient
    advantages  the weight of each token (`algorithm.advantage`)
    mask        bool: the tokens to train on; the other tensors are 0 elsewhere

and returns the loss of each token, [sequences, length]. As with the built-in losses, `algorithm.mismatch` then weights it, the KL and the
entropy are added, and `algorithm.aggregation` reduces it over the minibatch; tokens outside the mask do not count. A minibatch is
split into micro-batches, so the loss of a sequence must not depend on the other sequences: try_loss.py checks it before a run starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fsbarrier.errors import UsageError
from fsbarrier.user_code import code_file, described_failure, load_named

PARAMETERS = ("new", "old", "engine", "reference", "entropy", "advantages", "mask")

TokenLoss = Callable[..., Tensor]


@cache
def load_loss(value: str) -> TokenLoss:
    """Load the user's function ("path/file.py:function"); the result takes all PARAMETERS. It and its calls raise UsageError."""
    function, setting = load_named("algorithm.loss", value), f"algorithm.loss={value}"
    if not callable(function):
        raise UsageError(f"{setting}: {value.rpartition(':')[2]} is not a function")
    parameters = inspect.signature(function).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    wanted = [name for name in PARAMETERS if anything or name in parameters]
    try:
        inspect.signature(function).bind(**dict.fromkeys(wanted))
    except TypeError as error:
        raise UsageError(f"{setting}: its parameters may be {', '.join(PARAMETERS)}: {error}") from None

    def call(**given: Tensor | None) -> Tensor:
        try:
            losses = function(**{name: given[name] for name in wanted})
        except torch.OutOfMemoryError:
            raise
        # The user's code may raise anything.
        except (Exception, SystemExit) as error:
            raise UsageError(f"{setting}: {described_failure(error, code_file(function))}") from None
        wanted_like = given["new"]
        assert wanted_like is not None
        if not isinstance(losses, Tensor) or losses.shape != wanted_like.shape:
            gave = f"a tensor {list(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)[:80]
            raise UsageError(
                f"{setting}: must return the loss of each token, a tensor {list(wanted_like.shape)}, but gave {gave}"
            )
        return losses

    return call
