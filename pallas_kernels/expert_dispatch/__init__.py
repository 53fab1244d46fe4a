"""Routed experts: send each token through its experts and add up the weighted results."""

from pallas_kernels.expert_dispatch.op import expert_ffn

__all__ = ["expert_ffn"]
