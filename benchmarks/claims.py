"""The claims of the four papers, and the cells that test them; conclusions.py writes what became of them."""

from dataclasses import dataclass

STUDIES = {
    "snell2021": "How single-head attention learns (Snell et al. 2021)",
    "kobayashi2020": "Norms instead of weights (Kobayashi et al. 2020)",
    "zheng2021": "CODA (Zheng et al. 2021)",
    "heo2024": "daGPAM (Heo & Choi 2024)",
}


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, and the cells of an item that test it, by column and end of the row."""

    text: str
    item: str
    column: str  # a regular expression
    row: str  # a regular expression


BLEU, JSD, PERPLEXITY = ".*BLEU", r"average JSD \(nats\)", "(test|validation) perplexity"
EITHER = ".*BLEU|validation perplexity"
TRAINED, AT_ONE = "daGPAM, λ trained − softmax", "daGPAM, λ⁺ = 1, λ⁻ = 1"
UNTRAINED = f"{AT_ONE} − softmax"
OTHERS = "(NON|NAP|de-attention) − softmax"
BEST = ", each at the best rate tried"
CLAIMS = {
    "snell2021": (
        Claim("The logits start to change as eq. 54 says (A.2)", "derivative", ".*", ".*eq. 54"),
        Claim("The probabilities start to change as eq. 15 is printed (§4.1)", "derivative", ".*", ".* as printed"),
        Claim(
            "Attention agrees with the probe of a model that never attended: A(α, β^uf) (Table 2)",
            "table2",
            r"A\(α, β\^uf\) − Â",
            ".*",
        ),
        Claim("Word counts agree with that probe: A(β^uf, β^px) (Table 2)", "table2", r"A\(β\^uf, β\^px\) − Â", ".*"),
        Claim("Saliency agrees with that probe: A(Δ, β^uf) (Table 2)", "table2", r"A\(Δ, β\^uf\) − Â", ".*"),
        Claim(
            "Attention agrees with the probe of a trained model: A(α, β) (Table 2)", "table2", r"A\(α, β\) − Â", ".*"
        ),
        Claim("The agreement A(α, β^uf) rises at first (A.7)", "fig2", ".* − first checkpoint", ".*"),
        Claim("The agreement A(α, β^uf) falls after its peak (A.7)", "fig2", ".* − last checkpoint", ".*"),
        Claim("Attention is not learnt without β (Table 10)", "table10", ".* − .*", ".*"),
        Claim("The optimal attention agrees with the probe in 53 %: A(α^opt, β) (A.1)", "a1", r"A\(α\^opt, β\)", ".*"),
        Claim("On SMS two initializations agree less than on SST (A.9)", "a9", ".*", "SMS − .*"),
        Claim("Permutations and mixtures are harder to copy (Figure 3)", "fig3", "final accuracy.*", ".*"),
        Claim("40 of 60 types are always learnt (Figure 3)", "fig3", "share of seeds.*", ".*"),
        Claim("One good head of eight is enough to learn (Figure 6)", "fig6", "final accuracy", "one good.*"),
        Claim("Early, β is on the word and next to it (Figure 7)", "fig7", "early: .*", ".*"),
        Claim("Late, β is at the last position (Figure 7)", "fig7", "late: .*", ".*"),
        Claim("Copying is always learnt (§6.2)", "section62", ".*", "copy"),
        Claim("A fixed permutation is never learnt (§6.2)", "section62", ".*", "permutation function"),
    ),
    "kobayashi2020": (
        Claim("Norms align words better than weights (§5)", "alignment", "AWO|AWI", "norm − weight, .*"),
        Claim("Norms align words better than chance (our check)", "alignment", ".*", ".* − a random source word"),
        Claim("Tokens with much weight have short vectors (Table 2)", "table2", ".*", ".*"),
        Claim("Heads with much weight on [SEP] have short vectors for it (Figure 4)", "figure4", ".*", ".*"),
        Claim("Special tokens have a smaller share by norm than by weight (Figure 3)", "figure3", "its share.*", ".*"),
        Claim("Rare words have longer vectors (§4.3)", "frequency", ".*", r"rank, ‖f\(x\)‖"),
        Claim("Norms depend on frequency more than weights do (§4.3)", "frequency", ".*", r"‖f\(x\)‖ − α"),
    ),
    "zheng2021": (
        Claim("Language models: CODA has a lower perplexity (Table 1)", "table1", PERPLEXITY, "CODA − Transformer"),
        Claim("Language models: CODA's heads differ more (Figure 2)", "fig2", JSD, "CODA − Transformer"),
        Claim("CODA translates better (Table 2)", "table2", BLEU, "CODA − Transformer"),
        Claim("More heads make the Transformer worse (Table 3)", "table3", EITHER, "Transformer, .* heads"),
        Claim("More heads make CODA better (Table 3)", "table3", EITHER, "CODA, .* heads"),
        Claim("CODA is better at every number of heads (Table 3)", "table3", EITHER, "CODA − Transformer"),
        Claim("Noise alone helps (Table 4)", "table4", BLEU, "CODA-CS − Transformer"),
        Claim("The cascade alone helps (Table 4)", "table4", BLEU, "RealFormer − Transformer"),
        Claim("Both help (Table 4)", "table4", BLEU, "CODA − Transformer"),
        Claim("The cascade helps in addition to the noise (Table 4)", "table4", BLEU, "CODA − CODA-CS"),
        Claim("CODA is better than RealFormer (Table 4)", "table4", BLEU, "CODA − RealFormer"),
        Claim("CODA's heads differ more (Table 4)", "table4", JSD, "CODA − (Transformer|RealFormer)"),
        Claim("Noise makes heads differ more (Table 4)", "table4", JSD, "CODA-CS − Transformer"),
        Claim("The cascade makes heads differ more (Table 4)", "table4", JSD, "RealFormer − Transformer"),
        Claim("The cascade adds to the noise: heads differ more (Table 4)", "table4", JSD, "CODA − CODA-CS"),
        Claim("At its best learning rate, CODA translates better", "rates", BLEU, f"CODA − Transformer{BEST}"),
        Claim("At its best learning rate, noise alone helps", "rates", BLEU, f"CODA-CS − Transformer{BEST}"),
        Claim("At its best learning rate, the cascade alone helps", "rates", BLEU, f"RealFormer − Transformer{BEST}"),
        Claim("Models whose heads differ more translate better (§5.4)", "section54", ".*", "r over the four models.*"),
    ),
    "heo2024": (
        Claim("15 layers: daGPAM has a lower perplexity (Table 1)", "ptb", PERPLEXITY, TRAINED),
        Claim("15 layers: NON, NAP and de-attention are worse", "ptb", "test perplexity", OTHERS),
        Claim("daGPAM keeps more of the residual (Figure 4)", "ptb", "(relative residual|residual norm).*", TRAINED),
        Claim("Its tokens are less similar (Figure 4)", "ptb", "mean cosine.*", TRAINED),
        Claim("Its query gradients are larger (Figure 4)", "gradients", "query gradient.*", TRAINED),
        Claim("It keeps more of the residual at initialization (Figure 5)", "faithfulness", "relative.*", UNTRAINED),
        Claim("Its tokens are less similar at initialization (Figure 5)", "faithfulness", "mean cosine.*", UNTRAINED),
        Claim("Its outputs leave the convex hull (Figure 1)", "convex", "outputs outside.*", AT_ONE),
        Claim("8 layers: daGPAM has a lower perplexity", "language", PERPLEXITY, TRAINED),
        Claim("daGPAM translates better, Pre-LN", "translation", BLEU, TRAINED),
    ),
}
MAIN = {  # the claims that a paper's abstract makes
    "snell2021": (
        "Attention is not learnt without β (Table 10)",
        "Attention agrees with the probe of a model that never attended: A(α, β^uf) (Table 2)",
    ),
    "kobayashi2020": ("Norms align words better than weights (§5)",),
    "zheng2021": (
        "Language models: CODA has a lower perplexity (Table 1)",
        "CODA translates better (Table 2)",
        "Both help (Table 4)",
    ),
    "heo2024": (
        "15 layers: daGPAM has a lower perplexity (Table 1)",
        "Its tokens are less similar (Figure 4)",
        "daGPAM translates better, Pre-LN",
    ),
}
CONDITIONS = {
    "snell2021": "Classifiers have a vocabulary without the rare words that the authors keep because GloVe has a "
    "vector for them, and SST has its official parts, so these rows are stand-ins. Multi30k has the official files, "
    "with our own subword model. A(α^opt, β) is larger here than in the paper.",
    "kobayashi2020": "The alignment runs are our own models: 159,977 sentence pairs of Europarl instead of all, 5,000 "
    "updates, an untuned recipe, the checkpoint with the best validation loss. The BERT part is read with "
    "all-MiniLM-L6-v2 instead of BERT. Seeds draw other texts for this one model. They do not replicate a model, so "
    "these rows have no verdict. Their signs are the paper's, except for commas and periods in Figure 3 and for other "
    "words in Table 2; on [SEP] both correlations are almost 0.",
    "zheng2021": "All models of Multi30k (3 layers, width 256) share one recipe, except the learning rate in the rows "
    "of the item rates. Longer training might still help: some models are best at the very end.",
    "heo2024": "All models of 15 layers share one recipe. Leaving the convex hull is a geometric property, not a "
    "difference within seeds. With λ⁻ = 0, without negative weights, outputs leave it nearly as often "
    "(docs/results.md).",
}
