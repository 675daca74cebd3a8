"""CODA's σ by bands of rows, in PyTorch: for more heads or hidden units than `coda.py` holds in a multiprocessor.

The same equations as there. The heads are the middle axis of every product, (units,heads) · (b,heads,pairs), so logits
are never transposed. A hidden layer has about ACTIVATIONS numbers in a band. The backward pass computes each band
again, so the memory is that of one band. In a causal layer the keys after a band's last row are cut off.
σ's weights are repeated for each example, (b,units,heads), because members may have their own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from attnlab.mechanisms.kernels.coda import Net, read_net
from attnlab.mechanisms.kernels.noise import gaussian
from attnlab.mechanisms.kernels.pairs import Visibility

ACTIVATIONS = 2**26  # of one hidden layer


def collide(
    z: Tensor, carry: Tensor, net: Net, seen: Visibility, noise: Tensor | None, layer: int, own: bool, residual: bool,
    biased: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Turn z (b,h,i,j) from S into Z, in place, where visible; products in dtype; net and noise: as in coda.py."""
    b, heads, rows, keys = z.shape
    linears, _, width = _read_linears(net, b, dtype)
    shift = keys - rows if seen.flags["CAUSAL"] else 0
    for band, end, hidden in _split_rows(seen, z, width):
        s = z[:, :, band, :end].float()
        hidden = hidden | (s == -torch.inf) if biased else hidden
        c = carry[:, :, band, :end].float().masked_fill(hidden, 0.0)
        x = (s + c).masked_fill(hidden, 0.0) if own else c
        *_, mixed = _run_net(linears, x.to(dtype).flatten(2))
        mixed = mixed.view(x.shape).float() + (s + c if own or residual else s)
        if noise is not None:
            at = torch.arange(band.start + shift, band.stop + shift, device=z.device)
            mixed += gaussian(noise, layer, b, heads, at, end, torch.float32)
        z[:, :, band, :end] = mixed


def collide_backward(
    s: Tensor, carry: Tensor, net: Net, seen: Visibility, grad: Tensor, out: Tensor, own: bool, residual: bool,
    biased: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the gradient of net (1,size), and write the carry's to out, which may be grad: as in coda.py."""
    linears, members, width = _read_linears(net, carry.shape[0], dtype)
    sums = [[x.new_zeros(members, *x.shape[1:], dtype=torch.float32) for x in linear] for linear in linears]
    for band, end, hidden in _split_rows(seen, carry, width):
        x = carry[:, :, band, :end].float()
        hidden = hidden | (s[:, :, band, :end] == -torch.inf) if biased else hidden
        x = (x + s[:, :, band, :end] if own else x).masked_fill(hidden, 0.0)
        *inputs, _ = _run_net(linears, x.to(dtype).flatten(2))
        g = grad[:, :, band, :end].to(dtype)
        e = g.flatten(2)
        for (weight, _), (dweight, dbias), y in zip(linears[::-1], sums[::-1], inputs[::-1], strict=True):
            dweight += torch.bmm(e, y.mT).unflatten(0, (members, -1)).sum(1, dtype=torch.float32)
            dbias += e.unflatten(0, (members, -1)).sum((1, 3), dtype=torch.float32).unsqueeze(2)
            e = torch.bmm(weight.mT, e)
            if y is not inputs[0]:
                e = torch.where(y > 0, e, 0.2 * e)
        dx = e.view(x.shape).masked_fill(hidden, 0.0)
        out[:, :, band, :end] = dx + grad[:, :, band, :end] if residual else dx
    return torch.cat([x.flatten() for linear in sums for x in linear])[None]


def _read_linears(net: Net, b: int, dtype: torch.dtype) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    """Return weights (b,m,n) and biases (b,m,1) of each example, the number of members, and σ's width."""
    pointers, members, width = read_net(net)
    present = [x.to(dtype) for x, given in zip(pointers, net, strict=True) if given is not None]
    linears = []
    for weight, bias in zip(present[::2], present[1::2], strict=True):
        each = (weight.view(members, 1, *weight.shape[-2:]), bias.view(members, 1, -1, 1))
        w, c = (x.expand(-1, b // members, -1, -1).flatten(0, 1) for x in each)
        linears.append((w, c))
    return linears, members, width


def _run_net(linears: list[tuple[Tensor, Tensor]], x: Tensor) -> list[Tensor]:
    """Return σ's input x (b,heads,pairs), its hidden layers and its output."""
    layers = [x]
    for index, (weight, bias) in enumerate(linears):
        y = torch.baddbmm(bias, weight, layers[-1])
        layers.append(y if index == len(linears) - 1 else F.leaky_relu_(y, 0.2))
    return layers


def _split_rows(seen: Visibility, z: Tensor, width: int) -> Iterator[tuple[slice, int, Tensor]]:
    """Yield the rows of each band, the end of the keys that they may see, and which of these pairs are hidden."""
    b, _, rows, keys = z.shape
    size = max(1, ACTIVATIONS // (b * width * keys))
    j = torch.arange(keys, device=z.device)
    for first in range(0, rows, size):
        last = min(rows, first + size)
        end = max(0, min(keys, last + keys - rows)) if seen.flags["CAUSAL"] else keys
        if end == 0:
            continue
        hidden = torch.zeros(1, 1, 1, end, dtype=torch.bool, device=z.device)
        if seen.flags["CAUSAL"]:
            hidden = j[:end] > torch.arange(first, last, device=z.device)[:, None] + (keys - rows)
        if seen.flags["MASKED"]:
            mask = seen.mask.as_strided((b, 1, rows, keys), (seen.strides[0], 0, *seen.strides[1:]))
            hidden = hidden | (mask[:, :, first:last, :end] == 0)
        yield slice(first, last), end, hidden
