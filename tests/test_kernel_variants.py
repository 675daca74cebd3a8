"""Triton compiles a kernel again only where that makes it faster: not for each width of a batch, nor for each layer."""

from gpu_compile import assert_compiles

COUNT = """
from collections import defaultdict
from contextlib import ExitStack
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from attnlab.mechanisms.kernels import one_pass, online, softmax, tiles
from attnlab.training import loss_kernel

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
WIDTHS = range(8, 65, 8)


def count_variants(*modules, launch):
    "Return how often each kernel of the modules is compiled while launch() runs, by its name."
    variants = defaultdict(set)

    def listen(kernel):
        bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

        def start(grid, *arguments, **constants):
            _, specialization, options = bind(*arguments, debug=False, **constants)
            variants[kernel.fn.__name__].add((*map(str, specialization), str(options)))

        return patch.object(kernel, "start", start)

    with ExitStack() as stack:
        for module in modules:
            for kernel in vars(module).values():
                if hasattr(kernel, "start"):
                    stack.enter_context(listen(kernel))
        launch()
    return {name: len(found) for name, found in variants.items()}


def make_heads(width, heads=4, size=64):
    "q, k, v and their gradient as the model makes them: views of one product, (b,h,width,size)."
    joined = torch.zeros(3, width, 3 * heads, size, dtype=torch.bfloat16)
    q, k, v = joined.transpose(1, 2).chunk(3, dim=1)
    return q, k, v, torch.zeros(3, width, heads, size, dtype=torch.bfloat16).transpose(1, 2)


def make_mask(width):
    return torch.ones(3, 1, 1, width, dtype=torch.bool)
"""

SHORT = """
def launch_short():
    for width in WIDTHS:
        q, k, v, grad = make_heads(width)
        softmax.short_softmax(q, k, v, make_mask(width), None, False, 0.1, 0.0)
        softmax.short_softmax_backward(grad, q, k, v, make_mask(width), None, False, 0.1, 0.0)

counts = count_variants(softmax, launch=launch_short)
assert counts == {"_forward": 3, "_backward": 3}, counts  # tiles of 16, 32 and 64
"""

LOSS = """
def launch_loss():
    for width in WIDTHS:
        targets = 512 // width * width  # at 56: 504, which is no multiple of 16
        logits, goals = torch.zeros(targets, 320), torch.zeros(targets, dtype=torch.long)
        for ignored in (0, -100):
            losses, levels = loss_kernel.target_losses(logits, goals, torch.zeros(1), torch.zeros(1), ignored)
            loss_kernel.target_losses_backward(losses, logits, goals, torch.zeros(1), torch.zeros(1), levels, ignored)

counts = count_variants(loss_kernel, launch=launch_loss)
assert counts == {"_forward": 1, "_backward": 1}, counts
"""

LONG = """
def launch_long():
    for width in WIDTHS:
        for layer in range(3):
            q, k, v, grad = make_heads(width)
            seed, options = torch.zeros((), dtype=torch.long), (online.SOFTMAX.value, True, 0.1, 0.0, layer, 0.0)
            out, lse = one_pass.one_pass(q, k, v, make_mask(width), None, None, None, seed, None, *options)
            given = (grad, q, k, v, make_mask(width), None, None, seed, None, out, lse, *options, False, False)
            one_pass.one_pass_backward(*given)

counts = count_variants(one_pass, online, tiles, launch=launch_long)
# _attend: tiles of 16 queries and of 64; all widths are multiples of 8, which EVEN tells it, whatever else they are
# backward: keys that are a multiple of 16 or not, for wide loads of masks
assert counts == {"_attend": 2, "_backward_keys": 2, "_backward_queries": 2}, counts
"""

OFF = """
parameters = [x for x in softmax._forward.params if x.do_not_specialize]
for parameter in parameters:
    parameter.do_not_specialize = False
counts = count_variants(softmax, launch=launch_short)
for parameter in parameters:
    parameter.do_not_specialize = True
assert counts == {"_forward": 6, "_backward": 3}, counts
"""


def test_short_attention_is_compiled_once_for_each_tile():
    assert_compiles(COUNT + SHORT)


def test_the_count_notices_a_kernel_that_is_compiled_for_widths():
    assert_compiles(COUNT + SHORT + OFF)


def test_the_loss_is_compiled_once():
    assert_compiles(COUNT + LOSS)


def test_long_attention_is_not_compiled_for_each_layer():
    assert_compiles(COUNT + LONG)
