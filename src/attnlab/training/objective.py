"""What training minimises: the loss of the scored targets, of one model or of each member of a population."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnlab.mechanisms.mechanism import widen
from attnlab.models.affine import has_kernels

PROGRAMS = 64  # compiled programs per block: one for each width, mode (training or not) and place (first or not)
# inductor's mixed-order reduction makes the gradient of a layer norm over many tokens slower
COMPILING: dict[str, str | int | bool | Callable] = {"triton.mix_order_reduction": False}


def compute_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return −log p of each target (…), from logits (…,words), in float32 at least."""
    flat, goals = logits.flatten(0, -2), targets.flatten()
    if has_kernels(logits):
        from attnlab.training.loss_kernel import target_losses

        none = torch.zeros(1, device=logits.device)
        return target_losses(flat, goals, none, none, -100)[0].view_as(targets)
    return F.cross_entropy(widen(flat), goals, reduction="none").view_as(targets)


class Objective(nn.Module):
    """Σ over scored targets of −log p(target), label-smoothed: (1 − s)·(−log p) + s·(mean of −log p over the words).

    With a z-loss, c · (log Σ_w exp logit_w)² is added for each scored target (PaLM, Chowdhery et al. 2022, §5).
    smoothing and z_loss have one number for each member of a population; then there is one sum for each, (s,).
    """

    def __init__(
        self, model: nn.Module, *, smoothing: Sequence[float] = (0.0,), z_loss: Sequence[float] = (0.0,),
        padding: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.smoothing, self.z_loss, self.padding = model, tuple(smoothing), tuple(z_loss), padding
        self.is_adaptive = not hasattr(model.readout, "weight")
        for name, values in (("label_smoothing", smoothing), ("z_loss", z_loss)):
            if self.is_adaptive and any(values):
                raise ValueError(f"{name} needs a softmax over all words, which this model lacks: leave it out")
        device = next(model.parameters()).device  # a captured step copies nothing from the host
        self.shares, self.factors = (torch.tensor(x, device=device) for x in (self.smoothing, self.z_loss))
        self._compiled: list[Callable] = []  # the blocks, compiled for each shape

    def forward(self, inputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        losses = self._compute_losses(self.model.hidden(*inputs), targets)  # type: ignore[operator]
        return losses.sum() if len(self.shares) == 1 else losses.view(len(self.shares), -1).sum(1)

    def compile_parts(self, *, dynamic: bool) -> None:
        """Compile the blocks; compiling the whole model would take minutes. dynamic: once for all shapes.

        This also raises torch's limit of programs per function, above which torch.compile gives up without an error.
        """
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, PROGRAMS)
        for block in self.model.all_blocks():  # type: ignore[operator]
            block.compile(dynamic=dynamic, options=COMPILING)

    @contextmanager
    def use_compiled(self) -> Iterator[None]:
        """Compile the blocks for each shape that they get in this context. Outside, they stay as they are.

        So the shapes of a validation, which are many, are never compiled.
        """
        blocks = list(self.model.all_blocks())  # type: ignore[operator]
        if not self._compiled:
            self.compile_parts(dynamic=False)
            self._compiled = [block._compiled_call_impl for block in blocks]
        for block, program in zip(blocks, self._compiled, strict=True):
            block._compiled_call_impl = program
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None

    def _compute_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target, (targets,), 0 where it is not scored."""
        if self.is_adaptive:
            nll = self.model.readout.nll(hidden, targets)  # type: ignore[operator,union-attr]
            return nll.masked_fill(targets == self.padding, 0.0)
        logits, goals = self.model.readout(hidden).flatten(0, -2), targets.flatten()  # type: ignore[operator]
        ignored = self.padding if targets.dim() > 1 else -100
        if has_kernels(logits):
            from attnlab.training.loss_kernel import target_losses

            losses: Tensor = target_losses(logits, goals, self.shares, self.factors, ignored)[0]
            return losses
        return self._spread_losses(widen(logits), goals, ignored)

    def _spread_losses(self, logits: Tensor, goals: Tensor, ignored: int) -> Tensor:
        """Return the loss of each target by torch's cross-entropy."""
        alike = len(set(self.smoothing)) == 1
        share = self.smoothing[0] if alike else 0.0
        losses = F.cross_entropy(logits, goals, ignore_index=ignored, reduction="none", label_smoothing=share)
        if alike and not any(self.z_loss):
            return losses
        losses, scored = losses.view(len(self.shares), -1), (goals != ignored).view(len(self.shares), -1)
        if not alike:
            mean = -logits.log_softmax(-1).mean(-1).view_as(losses) * scored
            losses = torch.lerp(losses, mean, self.shares.to(losses.dtype)[:, None])
        square = logits.logsumexp(-1).square().view_as(losses) * scored
        return (losses + self.factors[:, None] * square).flatten()
