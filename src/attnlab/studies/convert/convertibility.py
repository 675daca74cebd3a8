"""The item: every mechanism in a pretrained model, and the tokens of training until the model is back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from attnlab.config import suggest_nearest
from attnlab.experiments.corpora import explain_missing_data
from attnlab.experiments.engine import NOT_MEASURED, Measured
from attnlab.experiments.plan import prepare_vocabulary
from attnlab.experiments.study import Findings, Setting
from attnlab.experiments.verdicts import Cell
from attnlab.huggingface.fine_tuning import TunedConfig, open_tuned_model
from attnlab.mechanisms import MECHANISMS
from attnlab.studies.convert import tiny_llama
from attnlab.studies.convert.excerpts import check_name, write_excerpts
from attnlab.studies.convert.figures import draw_recoveries, draw_tokens
from attnlab.studies.convert.plan import ORIGINAL, Conversion, ConversionPlan
from attnlab.studies.convert.recovery import Recovery
from attnlab.tasks import find_task
from attnlab.training.run_hashes import hash_weights

ITEM = "conversion"
OPTIONS = ("model", "data", "attention")
DEFAULT_TEXT = "wikitext-2"
START, END, RATIO = "log-perplexity at the start", "log-perplexity at the end", "times the original's"
BACK, SHARE = "tokens until back, or the budget", "share of seeds back"
AS_UNTOUCHED = "tokens until as untouched, or the budget"
UNITS = (
    "Log-perplexities are in nats per token of the validation text. A model is back at the first evaluation from which "
    "it stays within 1.01 times the original's log-perplexity. A seed that is not back counts with the budget; the "
    "mean is then a lower bound."
)


@dataclass(frozen=True)
class Converted:
    """What the ledger has of one mechanism in the model."""

    name: str
    seeds: dict[int, Recovery]
    reason: str = ""  # why some seeds, or all, have no value

    @property
    def mean_ratio(self) -> float:
        return sum(one.ratio for one in self.seeds.values()) / len(self.seeds)

    @property
    def mean_back(self) -> float:
        """The mean of the tokens until back, the budget where a seed is not back."""
        return sum(_cap(one.back, one) for one in self.seeds.values()) / len(self.seeds)

    @property
    def back_count(self) -> int:
        return sum(one.back is not None for one in self.seeds.values())


def convert(setting: Setting) -> Findings:
    """Convert the model on each text that data= names."""
    attentions = select_attentions(setting)
    plans = [ConversionPlan(setting, text) for text in list_texts(setting)]
    return Findings.join([_convert_on(plan, attentions) for plan in plans])


def list_texts(setting: Setting) -> list[str]:
    """Return the texts of a setting. Raises an error for one that is unknown, or that the smoke scale cannot have."""
    if setting.scale == "smoke":
        if given := [key for key in ("model", "data") if key in setting.options]:
            what = f"the smoke scale has a model and a text of its own: leave {given[0]}= out"
            raise ValueError(f"{what}, or choose --scale small or full")
        return [tiny_llama.TEXT]
    texts = list(dict.fromkeys(setting.options.get("data", DEFAULT_TEXT).split(",")))
    if setting.running:
        for text in texts:
            check_name(text)
    return texts


def select_attentions(setting: Setting) -> list[str]:
    """Return the mechanisms of attention=a,b,c or all, by default those of the scale; the original is always first."""
    given = setting.options.get("attention")
    if given is None:
        names = list(ConversionPlan(setting, "").size.attentions)
    else:
        names = list(MECHANISMS) if given == "all" else given.split(",")
    for name in names:
        if name not in MECHANISMS:
            near = suggest_nearest(name, MECHANISMS)
            raise ValueError(f"attention: unknown name {name!r}{near}; available: {', '.join(MECHANISMS)}, all")
    return list(dict.fromkeys([ORIGINAL, *names]))


def _convert_on(plan: ConversionPlan, attentions: Sequence[str]) -> Findings:
    setting = plan.setting
    if setting.running and (reason := explain_missing_data(lambda: _write_texts(plan))):
        return Findings([_make_cell(plan, name, START, (), reason) for name in attentions])
    runs = {(name, seed): plan.plan_run(name, seed) for seed in setting.seeds for name in attentions}
    if setting.running and any(map(setting.rows.is_missing, runs.values())):
        check_model(plan.model)
        check_weights(plan, runs)
        check_length(plan)
    measured = setting.rows.read_plan(runs)
    found = [read_conversion(name, measured, setting.seeds) for name in attentions]
    cells = [cell for one in found for cell in make_cells(plan, one)]
    return Findings(cells, draw_figures(plan, found), (*describe_setting(plan), *summarize(plan, found)))


def _write_texts(plan: ConversionPlan) -> None:
    if plan.data == tiny_llama.TEXT:
        tiny_llama.write_tiny_llama(plan.setting.folder.absolute() / tiny_llama.NAME, plan.text)
    else:
        write_excerpts(plan.data, plan.size.characters, plan.text, plan.setting.place.data_dir)


@lru_cache
def check_model(path: str) -> None:
    """Raise an error, once for all runs, if there is no such causal language model."""
    open_tuned_model(TunedConfig(path=path))


def check_weights(plan: ConversionPlan, runs: Mapping[tuple[str, int], Conversion]) -> None:
    """Raise ValueError if the ledger has rows of another local model of this name: a row's key has only the name."""
    rows, found = plan.setting.rows, hash_weights(plan.model)
    stored = rows.read_plan({key: run for key, run in runs.items() if not rows.is_missing(run)})
    known = [hashes for values in stored.values.values() if (hashes := values["weights"])]
    if found and any(hashes != list(found.values()) for hashes in known):
        what = f"model={plan.model}: the ledger has rows of another model with the name {plan.model_name}"
        raise ValueError(f"{what}; choose another --out")


def check_length(plan: ConversionPlan) -> None:
    """Raise ValueError if the training text is shorter than an update, or the validation text than an example."""
    recipe = plan.make_recipe(ORIGINAL, plan.setting.seeds[0])
    task = find_task(recipe.task).prepare(recipe.data, prepare_vocabulary(recipe, plan.setting.place))
    needed = {"train": ("training", plan.size.update_tokens), "valid": ("validation", plan.size.block)}
    for part, (name, least) in needed.items():
        if (count := int(task.get_lengths(part)[0].sum())) < least:
            what = f"the {name} part of data={plan.data} has {count:,} tokens"
            raise ValueError(f"{what}, but this scale needs at least {least:,}: give a longer text")


def read_conversion(name: str, measured: Measured[tuple[str, int]], seeds: Sequence[int]) -> Converted:
    """Put each seed of a mechanism beside the original with the same seed."""
    known, failures = measured.values, measured.failures
    pairs = {seed: ((name, seed), (ORIGINAL, seed)) for seed in seeds}
    both = {seed: keys for seed, keys in pairs.items() if all(key in known for key in keys)}
    recoveries = {seed: Recovery.from_values(*(known[key] for key in keys)) for seed, keys in both.items()}
    reasons = (failures[key] for keys in pairs.values() for key in keys if key in failures)
    return Converted(name, recoveries, next(reasons, ""))


def make_cells(plan: ConversionPlan, one: Converted) -> list[Cell]:
    """Return the cells of a mechanism: a row of the table."""
    recoveries, censored = list(one.seeds.values()), [seed for seed, each in one.seeds.items() if each.back is None]
    late = f"not back within {plan.size.budget:,} tokens: seed {', '.join(map(str, censored))}" if censored else ""
    if not recoveries:
        return [_make_cell(plan, one.name, START, (), one.reason or NOT_MEASURED)]
    columns: dict[str, Callable[[Recovery], float]] = {
        START: lambda each: each.losses[0],
        END: lambda each: each.losses[-1],
        RATIO: lambda each: each.ratio,
        BACK: lambda each: _cap(each.back, each),
        SHARE: lambda each: float(each.back is not None),
        AS_UNTOUCHED: lambda each: _cap(each.as_untouched, each),
    }
    notes = dict.fromkeys(columns, one.reason) | {BACK: "; ".join(filter(None, (late, one.reason)))}
    return [
        _make_cell(plan, one.name, column, tuple(map(value, recoveries)), notes[column])
        for column, value in columns.items()
    ]


def _make_cell(plan: ConversionPlan, name: str, column: str, values: tuple[float, ...], note: str) -> Cell:
    """Return a cell; without values, the note is the reason."""
    about = {"item": ITEM, "row": f"{plan.label}: {name}", "column": column, "tags": plan.setting.tags}
    if not values:
        return Cell(**about, not_run=note)  # type: ignore[arg-type]
    return Cell(**about, values=values, note=note, share=column == SHARE)  # type: ignore[arg-type]


def _cap(tokens: int | None, one: Recovery) -> float:
    return float(one.budget if tokens is None else tokens)


def describe_setting(plan: ConversionPlan) -> tuple[str, ...]:
    size = plan.size
    recipe = (
        f"{plan.model_name} on {plan.label}: LoRA of rank {size.lora} and the mechanism's own parameters, "
        f"{size.updates} updates of {size.update_tokens:,} tokens, {size.budget:,} in all."
    )
    return recipe, UNITS


def summarize(plan: ConversionPlan, found: Sequence[Converted]) -> list[str]:
    """Say in a sentence each what converts, what does not, and what cannot be put into the model."""
    others = [one for one in found if one.name != ORIGINAL]
    ran = sorted((one for one in others if one.seeds), key=lambda one: (one.mean_back, one.mean_ratio))
    back = [f"{one.name} ({one.mean_back:,.0f})" for one in ran if one.back_count == len(one.seeds)]
    some = [one for one in ran if 0 < one.back_count < len(one.seeds)]
    partly = [f"{one.name} ({one.back_count} of {len(one.seeds)})" for one in some]
    late = [f"{one.name} ({one.mean_ratio:.2f})" for one in ran if not one.back_count]
    none = [f"{one.name}: {one.reason}" for one in others if not one.seeds]
    budget = f"Not back within {plan.size.budget:,} tokens (times the original's log-perplexity at the end)"
    sentences = {
        "Back in every seed (mean number of tokens)": ", ".join(back),
        "Back in some seeds": ", ".join(partly),
        budget: ", ".join(late),
        "No value": "; ".join(none),
    }
    return [f"{plan.label}. {start}: {names}." for start, names in sentences.items() if names]


def draw_figures(plan: ConversionPlan, found: Sequence[Converted]) -> dict:
    """Draw the learning curves and the numbers of tokens, if any mechanism was run."""
    curves = {one.name: list(one.seeds.values()) for one in found if one.seeds and one.name != ORIGINAL}
    if not curves:
        return {}
    stem = plan.label.lower().replace(" ", "-")
    return {
        f"{stem}-curves": (
            draw_recoveries(curves),
            f"{plan.label}: log-perplexity of each mechanism by tokens of training (blue, one line per seed) and of "
            "the original with its own attention (grey). Where the lines meet, the model is back.",
        ),
        f"{stem}-tokens": (
            draw_tokens(curves),
            f"{plan.label}: tokens until each mechanism is back, one mark per seed. A hollow triangle at the right is "
            "a seed that is not back within the budget.",
        ),
    }
