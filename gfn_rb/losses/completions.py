"""Trajectory balance of language models: completions of prompts, with a reference model.

A completion y of a prompt x has one trajectory, its tokens in their order, so P_B = 1. The target
is p(y | x) proportional to p_ref(y | x) exp(r(x, y) / beta), the optimum of a reward r under a KL
penalty of weight beta. These functions read stored tokens; any policy may have made them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gfn_rb.arguments import require_kind, require_number
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.shapes import Bool, Float, Int64, Shaped


def completion_log_prob(
    logits: Float[Tensor, "n T V"], tokens: Int64[Tensor, "n T"], mask: Bool[Tensor, "n T"]
) -> Float[Tensor, "n"]:
    """Return the log-probability of each completion, the sum over its tokens, with gradient.

    Args:
        logits: output of the model at each position, for the token at that position.
        tokens: tokens of each completion, the end token included. Padding may be any token.
        mask: whether a position belongs to the completion; False for prompt and padding.

    Returns:
        Log-probabilities in nats.

    Raises:
        ArgumentError: ``tokens`` or ``mask`` has another dtype.
        ShapeError: ``tokens`` or ``mask`` has another shape than [n, T] of the logits.
    """
    return token_log_prob(logits, tokens, mask).sum(-1)


def token_log_prob(
    logits: Float[Tensor, "n T V"], tokens: Int64[Tensor, "n T"], mask: Bool[Tensor, "n T"]
) -> Float[Tensor, "n T"]:
    """Return the log-probability of each token, 0 outside of completions, with gradient.

    Arguments and errors are those of :func:`completion_log_prob`. Stored beside the tokens, it is
    what :func:`clipped_surrogate` and :func:`clipped_ratio` compare later policies with.

    Args:
        logits: output of the model at each position, for the token at that position.
        tokens: tokens of each completion, the end token included. Padding may be any token.
        mask: whether a position belongs to the completion; False for prompt and padding.
    """
    _require_shape(logits.shape[:-1], tokens=tokens, mask=mask)
    for name, given, dtype in (("tokens", tokens, torch.int64), ("mask", mask, torch.bool)):
        if given.dtype != dtype:
            raise ArgumentError(f"{name} must be {dtype}, got {given.dtype}")
    log_prob = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return log_prob.where(mask, 0)


def group_residual(
    log_prob: Float[Tensor, "n"],
    reference_log_prob: Float[Tensor, "n"],
    log_reward: Float[Tensor, "n"],
    group: Shaped[Tensor, "n"],
    weight: Float[Tensor, "n"] | None = None,
) -> Float[Tensor, "n"]:
    r"""Return the trajectory balance residual of completions, with log Z estimated per prompt.

    .. math:: \delta_i = \log \hat Z + \log p_\theta(y_i|x) - \log p_{ref}(y_i|x) - r_i / \beta,
       \quad \log \hat Z = \frac{\sum_j w_j (\log p_{ref}(y_j|x) + r_j / \beta
       - \log p_\theta(y_j|x))}{\sum_j w_j},

    with j over the completions of the same prompt in the batch. ``residual.square().mean()`` is the
    VarGrad loss: the variance of :math:`\delta` in each group (Richter et al. 2020,
    arXiv:2010.10436; Zhang et al. 2023, arXiv:2305.17010; for language models trained on the rows
    of other processes, Bartoldson et al. 2025, arXiv:2503.18929). The gradient does not pass
    through :math:`\hat Z`, where it would cancel.

    Args:
        log_prob: log p_theta of the current policy in nats, with gradient, as of
            :func:`completion_log_prob`.
        reference_log_prob: log p_ref of the frozen reference model, in nats.
        log_reward: r / beta, in nats.
        group: number of the prompt of each completion. The only completion of a prompt in a batch
            has residual 0.
        weight: weight w of each completion, at least 0, such as :func:`clipped_ratio`; weigh the
            squares by it, too. Default: None, all equal.

    Raises:
        ShapeError: an argument is not one number per completion.
    """
    _require_shape(
        torch.Size([len(log_prob)]),
        log_prob=log_prob,
        reference_log_prob=reference_log_prob,
        log_reward=log_reward,
        group=group,
        **({} if weight is None else {"weight": weight}),
    )
    excess = log_prob - reference_log_prob - log_reward
    same = (group[:, None] == group).to(excess.dtype)
    if weight is not None:
        same = same * weight
    # Without weight, a group has no estimate, and its residuals count for nothing.
    total = same.sum(1).clamp(min=torch.finfo(same.dtype).tiny)
    return excess - (same @ excess.detach()) / total


def clipped_ratio(
    log_prob: Float[Tensor, "n"], behaviour_log_prob: Float[Tensor, "n"], clip: float = 1.0
) -> Float[Tensor, "n"]:
    r"""Return importance weights of completions, without gradient.

    .. math:: w_i = \min(c, p_\theta(y_i|x) / p_{behaviour}(y_i|x)).

    They turn a mean over stored completions into one over the current policy, up to the bias of the
    clip (Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561)::

        weight = clipped_ratio(log_prob, batch["log_prob"])
        residual = group_residual(log_prob, reference, batch["log_reward"], prompt, weight)
        loss = (weight * residual.square()).mean()

    Args:
        log_prob: log p_theta of the current policy, in nats.
        behaviour_log_prob: log-probability under the policy that made each completion, in nats.
        clip: c, the largest weight, above 0.

    Raises:
        ArgumentError: ``clip`` is not a positive number.
        ShapeError: the log-probabilities differ in shape.
    """
    require_number("clip", clip)
    _require_shape(log_prob.shape, behaviour_log_prob=behaviour_log_prob)
    if not 0 < clip < math.inf:
        raise ArgumentError(f"clip must be a positive number, got {clip}")
    log_ratio = log_prob.detach() - behaviour_log_prob
    return log_ratio.clamp(max=math.log(clip)).exp()


def clipped_surrogate(
    log_prob: Float[Tensor, "n *T"],
    stored_log_prob: Float[Tensor, "n *T"],
    advantage: Float[Tensor, "n"],
    clip: float = 0.2,
    clip_above: float | None = None,
) -> Float[Tensor, "n *T"]:
    r"""Return the clipped cost of stored completions under the current policy, with gradient.

    .. math:: c = -\min(\rho A, \operatorname{clip}(\rho, 1 - \epsilon, 1 + \epsilon') A),
       \quad \rho = p_\theta / p_{stored},

    for each completion or each token (PPO, Schulman et al. 2017, arXiv:1707.06347; with advantages
    relative to a group GRPO, Shao et al. 2024, arXiv:2402.03300). The gradient is 0 where the ratio
    has left the interval in the direction of the advantage. Presets drop ``log_prob`` unless it is
    kept (``keep=["log_prob"]``)::

        log_prob = token_log_prob(model(batch["tokens"]), batch["tokens"], mask)
        cost = clipped_surrogate(log_prob, batch["log_prob"], batch["advantage"])
        loss = (cost * mask).sum() / mask.sum()

    Args:
        log_prob: log-probabilities under the current policy in nats, [n] of completions or [n, T]
            of tokens.
        stored_log_prob: those under the policy that made the completions, of the same shape.
        advantage: advantage A of each completion.
        clip: epsilon, above 0 and below 1.
        clip_above: epsilon', above 0 (DAPO, Yu et al. 2025, arXiv:2503.14476, has 0.28). Default:
            ``clip``.

    Raises:
        ArgumentError: a limit is out of range.
        ShapeError: the arguments differ in shape.
    """
    clip_above = clip if clip_above is None else clip_above
    for name, value, most in (("clip", clip, 1.0), ("clip_above", clip_above, math.inf)):
        require_number(name, value)
        if not 0 < value < most:
            raise ArgumentError(f"{name} must be above 0 and below {most:g}, got {value}")
    _require_shape(log_prob.shape, stored_log_prob=stored_log_prob)
    _require_shape(log_prob.shape[:1], advantage=advantage)
    of_each = advantage.reshape(-1, *[1] * (log_prob.ndim - 1))
    ratio = (log_prob - stored_log_prob).exp()
    return -torch.minimum(ratio * of_each, ratio.clamp(1 - clip, 1 + clip_above) * of_each)


def _require_shape(shape: torch.Size, **tensors: Tensor) -> None:
    """Raise unless tensors have a shape: others would broadcast."""
    for name, tensor in tensors.items():
        require_kind(name, tensor, Tensor)
        if tensor.shape != shape:
            raise ShapeError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
