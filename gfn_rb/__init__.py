"""Replay for GFlowNets, native to TorchRL."""

__version__ = "0.1.0"
