"""Computes log-probabilities directly from hidden states, in slices of the vocabulary, without materializing all logits.

Matrix products use the head's precision without copying it; everything after them is in float32. The backward pass recomputes each slice
and its complete gradient. Only tensors of the size of the hidden states are accumulated over slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Memory per logit of the current slice: the logit in float32, and two more float32 values (the product before the conversion or the
# cap's slope, and the probability, which the entropy needs).
BYTES_PER_LOGIT = 12
# The logit of a banned token. With minus infinity, its product with the probability would be NaN.
NEVER = -1e9
# A logit below this belongs to a banned token, at any temperature.
LEAST = -1e6


@dataclass(frozen=True, slots=True)
class LogitScaling:
    """How an architecture scales its logits: multiplied by `scale`, then soft-capped to stay within ±`cap`."""

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Scale the logits in place."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, scaled: Tensor) -> Tensor | float:
        """The derivative of `apply_`, computed from its result."""
        if self.cap is None:
            return self.scale
        return scaled.div(self.cap).square_().neg_().add_(1).mul_(self.scale)


class LogProbHead(nn.Module):
    """A model's output head, as a module of its own, so that its weights can be sharded as one unit.

    `linear`: the model's own head, which also stays in the model. `max_bytes`: the memory that the logits may take at once. `banned`:
    the tokens that are never sampled.
    """

    def __init__(
        self, linear: nn.Linear, scaling: LogitScaling, max_bytes: int, banned: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.banned = banned
        self.linear = linear
        self.scaling = scaling
        self.max_bytes = max_bytes

    def forward(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return three float32 [n]: each target's log-probability after its hidden state, and the entropy and the self-certainty (without
        gradient) of the distribution that it was drawn from. hidden: [n, width]; targets: int64 [n]."""
        weight = self.linear.weight
        # A slice's gradient exists twice until it is copied into the whole.
        entry = BYTES_PER_LOGIT * len(hidden) + weight.shape[1] * weight.element_size()
        plan = _Plan(self.scaling, temperature, max(1, self.max_bytes // entry), self.banned)
        hidden = hidden.to(weight.dtype)
        outputs: tuple[Tensor, Tensor, Tensor] = _HeadLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, self.linear.bias, targets, plan
        )
        return outputs


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one call of the head is computed: `width` entries of the vocabulary at a time."""

    scaling: LogitScaling
    temperature: float
    width: int
    banned: tuple[int, ...]

    def slices(self, vocabulary: int) -> Iterator[slice]:
        for start in range(0, vocabulary, self.width):
            yield slice(start, min(start + self.width, vocabulary))

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, entries: slice) -> Tensor:
        """The logits of a slice of the vocabulary, before the temperature: float32 [n, slice]. The caller may change them in place."""
        products = torch.mm(hidden, weight[entries].T)
        if bias is not None:
            products += bias[entries]
        scaled = self.scaling.apply_(products.float())
        if banned := [
            token - entries.start for token in self.banned if entries.start <= token < entries.stop
        ]:
            scaled[:, banned] = NEVER
        return scaled

    def inside(self, targets: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """Return which targets lie in a slice, and their indices in it; other targets get a valid index without meaning."""
        at = targets - entries.start
        here = (at >= 0) & (targets < entries.stop)
        return here, at.clamp(0, entries.stop - entries.start - 1)[:, None]


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor]:
        # For each row: the largest logit so far, the sum of all e ** (logit - largest), the sum of these times (logit - largest), and the
        # sum of all logits.
        largest = torch.full_like(targets, -torch.inf, dtype=torch.float32)
        total, weighted, summed, chosen = (torch.zeros_like(largest) for _ in range(4))
        for entries in plan.slices(len(weight)):
            logits = plan.logits(hidden, weight, bias, entries)
            logits.div_(plan.temperature)
            summed += (logits.where(logits > LEAST, 0.0) if plan.banned else logits).sum(1)
            here, at = plan.inside(targets, entries)
            chosen = torch.where(here, logits.gather(1, at).squeeze(1), chosen)
            before, largest = largest, torch.maximum(largest, logits.amax(1))
            # Before the first slice the sums are 0 and `largest` is minus infinity, and their product would be NaN.
            rise = torch.where(total > 0, before - largest, 0.0)
            weighted = rise.exp() * (weighted + rise * total)
            total *= rise.exp()
            exponentials = logits.sub_(largest[:, None]).exp()
            total += exponentials.sum(1)
            weighted += torch.linalg.vecdot(exponentials, logits)
            # Free their memory before the next slice is computed.
            del logits, exponentials
        entropy = total.log() - weighted / total
        # The KL divergence of the uniform distribution from this one, over the entries that can be sampled.
        count = len(weight) - sum(token < len(weight) for token in plan.banned)
        certainty = largest + total.log() - summed / count - math.log(count)
        ctx.mark_non_differentiable(certainty)
        ctx.save_for_backward(hidden, weight, bias, targets, largest, total, entropy)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return chosen - largest - total.log(), entropy, certainty

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, largest, total, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden, dtype=torch.float32) if wants_hidden else None
        to_weight = torch.empty_like(weight) if wants_weight else None
        to_bias = torch.empty_like(bias) if wants_bias else None
        grad = torch.zeros_like(largest) if grad is None else grad
        grad = (grad / plan.temperature)[:, None]
        for entries in plan.slices(len(weight)):
            logits = plan.logits(hidden, weight, bias, entries)
            slope = plan.scaling.slope(logits)
            here, at = plan.inside(targets, entries)
            logits.div_(plan.temperature).sub_(largest[:, None])
            # d log p(target) / d logit is (is it the target) - p; d entropy / d logit is -p (log p + entropy).
            scale = -grad / total[:, None]
            if entropy_grad is None:
                logits.exp_().mul_(scale)
            else:
                of_entropy = (entropy_grad / plan.temperature / total)[:, None]
                probabilities = logits.exp()
                logits.add_((entropy - total.log())[:, None]).mul_(-of_entropy).add_(scale).mul_(
                    probabilities
                )
                del probabilities
            logits.scatter_add_(1, at, grad * here[:, None]).mul_(slope)
            del slope
            if to_bias is not None:
                to_bias[entries] = logits.sum(0)
            step = logits.to(weight.dtype)
            if to_hidden is not None:
                to_hidden += torch.mm(step, weight[entries])
            if to_weight is not None:
                to_weight[entries] = torch.mm(step.T, hidden)
            del logits, step
        to_hidden = None if to_hidden is None else to_hidden.to(hidden.dtype)
        return to_hidden, to_weight, to_bias, None, None
