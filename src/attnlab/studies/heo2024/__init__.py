"""Heo & Choi 2024, Generalized Probabilistic Attention Mechanism in Transformers: what is known of it, by item."""

from attnlab.experiments.study import Item, Study
from attnlab.studies.heo2024.attentions import OPTIONS
from attnlab.studies.heo2024.deep import gradients, ptb, rates, starts
from attnlab.studies.heo2024.initialisation import faithfulness
from attnlab.studies.heo2024.reachable import convex
from attnlab.studies.heo2024.shallow import language, translation

STUDY = Study(
    "heo2024",
    "Heo & Choi 2024, Generalized Probabilistic Attention Mechanism in Transformers",
    {
        "ptb": Item("Table 1, Figure 4: 15 layers, perplexity and rank collapse", ptb, options=OPTIONS),
        "gradients": Item("Figure 4: query gradients over training", gradients, options=OPTIONS),
        "rates": Item("The learning rate for 15 layers, chosen on validation", rates, edition=2, options=OPTIONS),
        "starts": Item("Why? Initial λ and W⁻ of the model of Table 1", starts, options=OPTIONS),
        "convex": Item("Figures 1 and 3: convex and affine outputs", convex),
        "faithfulness": Item("Figure 5: rank collapse at initialisation", faithfulness, edition=2, options=("data",)),
        "language": Item("A language model of 8 layers", language, options=OPTIONS),
        "translation": Item("Translation, Pre- and Post-LN", translation, options=OPTIONS),
    },
)
