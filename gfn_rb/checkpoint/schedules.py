"""Annealed parameters: saving how far a schedule has come."""

from __future__ import annotations

from typing import Any

from torchrl.data.replay_buffers.scheduler import ParameterScheduler


def schedule_state(scheduler: ParameterScheduler) -> dict[str, Any]:
    """Return what a scheduler needs to go on, as an ``extra`` of ``save_checkpoint``.

    It is the scheduler's ``state_dict`` less its functions (the ``lambda_fn`` of a
    ``LambdaScheduler``, the ``operator`` of a ``StepScheduler``), which cannot be saved without
    pickling and need not be: the constructor makes them anew.

    Args:
        scheduler: of a parameter of a buffer's sampler.

    Examples:
        >>> anneal = LinearScheduler(rb, "temperature", final_value=0.5, num_steps=1000)
        >>> save_checkpoint("run.ckpt", rb, anneal=schedule_state(anneal))
        >>> anneal.load_state_dict(load_checkpoint("run.ckpt", rb)["anneal"])
    """
    return {name: value for name, value in scheduler.state_dict().items() if not callable(value)}
