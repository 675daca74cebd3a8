"""Exclusive self-attention, XSA (Zhai 2026): no context has a part along the value of its own token.

    P = softmax(S)        y_i = Σ_j P_ij v_j        context = y_i − (y_i · v_i) v_i / ‖v_i‖²

It is linear in y_i, so contributions are exact: context = y_i (I − uᵀu) with u = v_i / ‖v_i‖, and u = 0 if v_i = 0.
`at` gives the index of each query's own value.
"""

import torch
from torch import Tensor

from attnlab.mechanisms.cosine import make_unit
from attnlab.mechanisms.mechanism import Sides, repeat_heads, select_own, widen
from attnlab.mechanisms.softmax import Softmax


class XSA(Softmax):
    kernels = Softmax.kernels | {"unit_rows"}
    self_only = True
    takes_members = Softmax.takes_members

    def turn(self, context: Tensor, v: Tensor, at: Tensor | None, sides: Sides) -> Tensor:
        own = select_own(v, context, at)  # v_i, (b,g,i,d)
        if self.wants_kernels(context):
            from attnlab.mechanisms.kernels import unit_rows

            if unit_rows.find_gap(context, own) is None:
                projected: Tensor = unit_rows.project_out(context, own)
                return projected
        u, y = widen(repeat_heads(make_unit(own), self.heads)), widen(context)
        return torch.addcmul(y, (y * u).sum(-1, keepdim=True), u, value=-1).to(context.dtype)
