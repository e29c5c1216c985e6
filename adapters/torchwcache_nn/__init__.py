"""The adapter for plain ``torch.nn.Module`` code and for Transformers models."""

from torchwcache_nn.adapter import NNAdapter

__all__ = ["NNAdapter"]
