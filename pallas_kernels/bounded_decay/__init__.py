"""Bounded-decay recurrence (delta, additive and slot read-outs) and its gate."""

from pallas_kernels.bounded_decay.documents import document_ids
from pallas_kernels.bounded_decay.gate import bounded_log_decay
from pallas_kernels.bounded_decay.op import bounded_decay, recurrent_step, slot_attention

__all__ = [
    "bounded_decay",
    "bounded_log_decay",
    "document_ids",
    "recurrent_step",
    "slot_attention",
]
