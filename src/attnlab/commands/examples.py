"""Two examples for each command, which --help shows."""

EXAMPLES = {
    "list": (
        "attnlab list",
        "attnlab list translation",
    ),
    "demo": (
        "attnlab demo",
        "attnlab demo attention=softmax,cog steps=300 copying=false --seeds 1 --out runs/cog",
    ),
    "describe": (
        "attnlab describe iwslt14 attention=coda",
        "attnlab describe tiny layers=4 heads=8",
    ),
    "train": (
        "attnlab train synthetic data=lexicon width=64 layers=2 heads=4 steps=300 --out runs/first",
        "attnlab train translation src=corpus.de tgt=corpus.en attention=./mine.py:Mine --device cuda",
    ),
    "evaluate": (
        "attnlab evaluate runs/first",
        "attnlab evaluate runs/first part=valid beam=1 --device cpu",
    ),
    "translate": (
        "attnlab translate runs/first < source.txt > target.txt",
        "attnlab translate runs/first n_best=3 < source.txt",
    ),
    "predict": (
        "attnlab predict runs/reviews --file lines.txt",
        "attnlab predict runs/reviews --words 0 --json < lines.txt",
    ),
    "generate": (
        'attnlab generate runs/shakespeare --prompt "ROMEO:" --tokens 300',
        "attnlab generate runs/shakespeare --temperature 0.8 --top-k 40 --seed 1 < prompts.txt",
    ),
    "export": (
        "attnlab export runs/shakespeare --to huggingface --out exported/shakespeare",
        "attnlab export runs/shakespeare weights=last",
    ),
    "diagnose": (
        "attnlab diagnose corpus.de corpus.en --out diagnosed",
        "attnlab diagnose reviews.csv --text review --label stars --limit 10000",
    ),
    "align": (
        "attnlab align runs/first corpus.de corpus.en --gold gold.talp --out links.txt",
        "attnlab align fertility corpus.de corpus.en --reverse fertility > links.txt",
    ),
    "align-train": (
        "attnlab align-train opus-mt-en-fr corpus.en corpus.fr --reverse opus-mt-fr-en --out en-fr",
        "attnlab align-train ./encoder corpus.de corpus.en --pairs 5000 --out de-en",
    ),
    "runs": (
        "attnlab runs",
        "attnlab runs runs/demo/work/runs",
    ),
    "check": (
        "attnlab check dagpam initial=0.5",
        "attnlab check ./mine.py:Mine",
    ),
    "inspect": (
        'attnlab inspect sentence-transformers/all-MiniLM-L6-v2 --text "The cat sat on the mat."',
        "attnlab inspect runs/first --file pairs.tsv --limit 1000 --examples 3 --out inspected/first",
    ),
    "compare": (
        "attnlab compare synthetic data=lexicon width=32 layers=2 feed_forward=64 steps=300 attention=softmax,coda",
        "attnlab compare translation data=multi30k lr=5e-4,1e-3 --no-controls --jobs 2 --until 9m",
    ),
    "reproduce": (
        "attnlab reproduce snell2021 --only fig3 --scale smoke",
        "attnlab reproduce zheng2021 data=wikitext-2 --only table1 --scale full --seeds 4",
    ),
    "ledger show": (
        "attnlab ledger show results/snell2021 --limit 20",
        "attnlab ledger show runs/demo attention=coda seed=0",
    ),
    "ledger merge": (
        "attnlab ledger merge here/ledger.jsonl there/ledger.jsonl --out both.jsonl",
        "attnlab ledger merge results/snell2021 copied/snell2021",
    ),
}  # fmt: skip


def write_examples(command: str) -> str:
    """Return the examples of a command as Typer prints them below its help: one line each."""
    return "\n\n".join(("Examples:", *(f"  {example}" for example in EXAMPLES[command])))
