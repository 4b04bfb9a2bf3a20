"""Pure tensor mathematics: mutable distributions and selections. No TorchRL, no I/O."""

__all__: list[str] = []
