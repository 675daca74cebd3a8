"""Ranking of next words by the kernel: equal to its definition at any size, with ties, NaN and infinite logits."""

import pytest
import torch

from attnlab.decoding.ranking import rank_words

pytest.importorskip("triton")
from gpu_compile import assert_compiles

from attnlab.decoding import ranking_kernel

pytestmark = [pytest.mark.kernel, pytest.mark.filterwarnings("ignore:.*FP_FUSION.*:UserWarning")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECIAL = {"padding": 0, "bos": 3, "eos": 2}


def by_definition(logits, k):
    return rank_words(logits.cpu(), k, dtype=torch.float32, **SPECIAL)


@pytest.mark.parametrize(("size", "k"), [(5, 2), (7, 5), (64, 1), (1009, 5), (2500, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_it_equals_the_definition(size, k, dtype):
    wide = 4 * torch.randn(6, size + 3, device=DEVICE)  # rows of a wider tensor
    logits = (wide.argsort(1) / size * 20 - 10 if dtype == torch.float16 else wide).to(dtype)[:, :size]
    got, (values, words, ends) = ranking_kernel.rank_words(logits, k, **SPECIAL), by_definition(logits, k)
    torch.testing.assert_close(got[0].cpu(), values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[2].cpu(), ends, atol=1e-5, rtol=1e-5)
    chosen, expected = (logits.cpu().gather(1, x.cpu())[values.isfinite()] for x in (got[1], words))
    assert torch.equal(chosen, expected)  # equal logits may change places
    for row, found in zip(values, got[1].tolist(), strict=True):
        assert not row.isfinite().all() or (len(set(found)) == k and not set(found) & set(SPECIAL.values()))


def test_of_equal_logits_the_first_word_comes_first():
    logits = torch.zeros(1, 40, device=DEVICE)
    assert ranking_kernel.rank_words(logits, 3, **SPECIAL)[1].tolist() == [[1, 4, 5]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_wrong_logits_show_at_the_end_and_name_no_word_outside(wrong):
    logits = torch.randn(3, 37, device=DEVICE)
    logits[1, 30], logits[2] = wrong, -torch.inf
    _, words, ends = ranking_kernel.rank_words(logits, 5, **SPECIAL)
    assert ends.isnan().tolist() == [False, True, True]
    assert bool(((words >= 0) & (words < 37)).all())


def test_what_is_covered():
    logits = torch.randn(3, 37)
    assert ranking_kernel.is_covered(logits, 5)
    assert not ranking_kernel.is_covered(logits.double(), 5)
    assert not ranking_kernel.is_covered(logits, 38)
    assert not ranking_kernel.is_covered(logits.T, 2)
    assert not ranking_kernel.is_covered(torch.empty(1, 70000), 5)


def test_it_compiles_for_a_gpu_that_is_not_here():
    assert_compiles(
        """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnlab.decoding.ranking_kernel import _rank

for kind, block in (("bf16", 16384), ("fp32", 65536)):
    fixed = {"K": 5, "BLOCK": block}
    types = {"logits": f"*{kind}", "values": "*fp32", "words": "*i64", "ends": "*fp32", "K": "constexpr"}
    signature = {name: types.get(name, "i32") for name in _rank.arg_names} | {"BLOCK": "constexpr"}
    options = {"num_warps": min(32, block // 1024)}
    triton.compile(ASTSource(_rank, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
"""
    )
