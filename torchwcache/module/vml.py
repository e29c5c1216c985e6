"""torch's elementwise functions on the CPU, before they may be called from several threads.

torch computes them with the Vector Math Library of oneMKL, each thread a part of the tensor. Up to oneMKL 2024.2, which the wheels
of torch 2.13 still have, the first call in a process chooses the kernel; while it does so, another thread may run one of low
accuracy. In that one call some rows of a rotary embedding's cosines are wrong by 1e-4, and at the next start they are right
(https://github.com/pytorch/pytorch/issues/188792). A cache would keep them, and hand them to everybody.
"""

from __future__ import annotations

import torch

__all__ = ["FUNCTIONS", "choose_vml_kernels"]

FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)
"""What torch calls the library for: ``IMPLEMENT_VML_MKL`` in its ``ATen/cpu/vml.h``."""

_chosen = False


def choose_vml_kernels() -> None:
    """Call each function once on a tensor that is too small for a second thread. Only the first call in a process does anything.

    Not for two threads at once: see :func:`~torchwcache.module.one_at_a_time.one_at_a_time`, which calls it. Where nothing is
    computed (in a ``FakeTensorMode``), it is left to the next call.
    """
    global _chosen
    if _chosen:
        return
    with torch._C.DisableTorchFunction():
        for dtype in (torch.float32, torch.float64):
            values = torch.full((8,), 0.5, dtype=dtype, device="cpu")
            if type(values) is not torch.Tensor or values.device.type != "cpu":
                return
            for function in FUNCTIONS:
                function(values)
    _chosen = True
