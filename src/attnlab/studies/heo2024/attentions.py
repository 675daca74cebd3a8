"""The attentions that are compared, by the names that attention= gives them.

daGPAM's λ⁺ and λ⁻ are trained from 1, or fixed at the values in the name. The paper's initial values, and the fixed
values that it tried, are not known. It compares with NON, NAP and de-attention (CoDA of Tay et al. 2019).
"""

from collections.abc import Sequence

from attnlab.experiments.corpora import Ground
from attnlab.experiments.plan import Measure
from attnlab.experiments.variants import Variant, Variants

OPTIONS = ("data", "attention")  # data=ptb attention=softmax,dagpam selects these only


def fix_lambdas(plus: float, minus: float) -> Variant:
    """Return daGPAM with fixed λ."""
    values = {"attention": "dagpam", "initial": f"({plus},{minus})", "tied": "false", "fixed": "true"}
    return Variant(f"dagpam-{plus:g}-{minus:g}", f"daGPAM, λ⁺ = {plus:g}, λ⁻ = {minus:g}", values)


SOFTMAX = Variant("softmax", "softmax", {"attention": "softmax"})
TRAINED = Variant("dagpam", "daGPAM, λ trained", {"attention": "dagpam", "initial": "(1.0,1.0)", "tied": "false"})
GRID = tuple(fix_lambdas(*pair) for pair in ((1.0, 1.0), (0.5, 0.5), (1.0, 0.5), (0.5, 1.0)))
OTHERS = tuple(
    Variant(name, label, {"attention": name})
    for name, label in {"nap": "NAP", "non": "NON", "de-attention": "de-attention"}.items()
)
ALL = (SOFTMAX, TRAINED, *GRID, *OTHERS)
STARTS = tuple(  # with W⁻ random, or −I, of which the paper's lemma on gradients speaks
    Variant("dagpam", f"daGPAM, λ from {start}, W⁻ {label}", {
        "attention": "dagpam", "initial": start, "tied": "false", "negative_init": name,
    })
    for name, label in {"xavier": "random", "minus-identity": "= −I"}.items()
    for start in ("0.0", "0.1", "0.5", "1.0")
)  # fmt: skip


def read_models(item: str, ground: Ground, variants: Sequence[Variant], measure: Measure) -> Variants:
    return Variants(item, ground, variants, measure, tuple(variant.name for variant in ALL))
