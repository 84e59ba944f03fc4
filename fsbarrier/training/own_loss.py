"""`algorithm.loss=path/file.py:function`: a user's own loss, and its trial on two short sequences before a run starts.

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
split into micro-batches, so the loss of a sequence must not depend on the other sequences: `try_loss` checks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fsbarrier.errors import UsageError
from fsbarrier.settings.sections import AlgorithmSettings
from fsbarrier.user_code import code_file, described_failure, load_named

#: the numbers of tokens of the two sequences
LENGTHS = [3, 2]
GIVEN = {
    "new": [[-0.5, -1.2, -2.0], [-0.9, -0.4, 0.0]],
    "old": [[-0.6, -1.3, -1.9], [-0.95, -0.35, 0.0]],
    "engine": [[-0.65, -1.4, -1.8], [-1.1, -0.3, 0.0]],
    "reference": [[-0.7, -1.0, -1.8], [-1.1, -0.6, 0.0]],
    "entropy": [[1.1, 0.7, 0.9], [0.8, 1.2, 0.0]],
    "advantages": [[1.0, 1.0, 1.0], [-0.5, -0.5, 0.0]],
}
PARAMETERS = ("new", "old", "engine", "reference", "entropy", "advantages", "mask")

TokenLoss = Callable[..., Tensor]


def try_loss(algorithm: AlgorithmSettings) -> None:
    """Raises UsageError if the function in `algorithm.loss` cannot be trained with."""
    setting = f"algorithm.loss={algorithm.loss}"
    value, gradient = measured(algorithm, [0, 1])
    if not torch.isfinite(torch.cat([value, gradient.flatten()])).all():
        raise UsageError(f"{setting}: its loss, or its gradient, is not finite")
    if not gradient.any():
        raise UsageError(f"{setting}: its loss has no gradient; compute it from `new`, which is the policy's")
    values, gradients = zip(*(measured(algorithm, [row]) for row in (0, 1)), strict=True)
    if not near(value, torch.stack(values).sum(0)) or not near(gradient, torch.cat(gradients)):
        raise UsageError(
            f"{setting}: the loss of a sequence depends on what is beside it, but a minibatch is split into parts whose losses are added; "
            "make the loss of each token of its own sequence"
        )


def near(first: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(first, other, rtol=1e-4, atol=1e-5))


def measured(algorithm: AlgorithmSettings, rows: list[int]) -> tuple[Tensor, Tensor]:
    """The sum of these sequences' losses, [1], and its gradients to `new` and `entropy`, [sequences, 2, 3]."""
    longest = max(LENGTHS[row] for row in rows)
    mask = torch.arange(longest) < torch.tensor([LENGTHS[row] for row in rows])[:, None]
    given = {name: torch.tensor(values)[rows, :longest] for name, values in GIVEN.items()}
    learned = [given[name].requires_grad_() for name in ("new", "entropy")]
    # An update passes zeros outside the mask.
    given = {name: torch.where(mask, values, 0.0) for name, values in given.items()}
    refers = algorithm.kl_coef or algorithm.kl_in_reward
    loss = load_loss(algorithm.loss)(**given | ({} if refers else {"reference": None}), mask=mask)[mask].sum()
    if loss.requires_grad:
        loss.backward()
    gradients = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in learned]
    padded = [torch.nn.functional.pad(tensor, (0, max(LENGTHS) - longest)) for tensor in gradients]
    return loss.detach()[None], torch.stack(padded, 1)


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
