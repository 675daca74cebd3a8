"""What the study trains at each scale: one recipe for every mechanism, and one planned run per mechanism and seed.

LoRA on all projections of the attention, the mechanism's own parameters, nothing else; AdamW, constant rate. Jobs are
ordered by seed: the first seed of all mechanisms comes first.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from attnlab.experiments.plan import RecipeRun, Workplace, describe_recipe, prepare_vocabulary
from attnlab.experiments.single_run import count_steps, is_finished, train_alone
from attnlab.experiments.study import Scale, Setting
from attnlab.huggingface.adaptation import is_added
from attnlab.huggingface.neutral import NEUTRAL
from attnlab.mechanisms import MECHANISMS
from attnlab.studies.convert import tiny_llama
from attnlab.studies.convert.excerpts import PARTS, label_text
from attnlab.training.loop import NotFiniteError
from attnlab.training.recipe import Recipe, resolve_recipe
from attnlab.training.run_folder import RunFolder, read_checkpoint
from attnlab.training.run_hashes import hash_weights

MODEL = "HuggingFaceTB/SmolLM2-135M"
ORIGINAL = "softmax"  # the model's own attention
LORA = (".a.weight", ".b.weight")  # ends of the names of its weights
FEW = (ORIGINAL, "dagpam", "softmax1", "entmax15", "sigmoid", "differential")


@dataclass(frozen=True)
class ConversionSize:
    """A scale of the study."""

    attentions: tuple[str, ...]
    block: int  # tokens of an example
    examples: int  # in an update
    updates: int
    evaluated: tuple[int, ...]  # updates after which the validation text is scored
    lora: int  # rank
    rate: float
    characters: tuple[int, int]  # of the training and validation text

    @property
    def update_tokens(self) -> int:
        return self.block * self.examples

    @property
    def budget(self) -> int:
        return self.update_tokens * self.updates


SIZES: dict[Scale, ConversionSize] = {
    "smoke": ConversionSize(
        (ORIGINAL, "dagpam", "sigmoid", "differential"), block=32, examples=8, updates=32,
        evaluated=(0, 4, 8, 16, 24, 32), lora=4, rate=5e-3, characters=(10**6, 10**6),
    ),
    "small": ConversionSize(
        FEW, block=128, examples=4, updates=16, evaluated=(0, 1, 2, 4, 8, 12, 16), lora=16, rate=1e-3,
        characters=(60_000, 8_000),
    ),
    "full": ConversionSize(
        tuple(MECHANISMS), block=512, examples=16, updates=64,
        evaluated=(0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64), lora=16, rate=1e-3,
        characters=(6_000_000, 75_000),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ConversionPlan:
    """The runs of one text: which model learns from which files, at which scale."""

    setting: Setting
    data: str  # the value of data=, or the label of the artificial language

    @property
    def size(self) -> ConversionSize:
        return SIZES[self.setting.scale]

    @property
    def label(self) -> str:
        return tiny_llama.TEXT if self.data == tiny_llama.TEXT else label_text(self.data)

    @property
    def model(self) -> str:
        """The folder or id of the model; an id that nobody reads if the rows are only drawn."""
        if not self.setting.running:
            return f"drawn/{self.model_name}"
        if self.data == tiny_llama.TEXT:
            return str(self.setting.folder.absolute() / tiny_llama.NAME)
        return self.setting.options.get("model", MODEL)

    @property
    def model_name(self) -> str:
        """The name of the model in the ledger: that of its folder, or of its id without the owner."""
        return tiny_llama.NAME if self.data == tiny_llama.TEXT else Path(self.setting.options.get("model", MODEL)).name

    @property
    def text(self) -> Path:
        """The folder of its excerpts."""
        size = "-".join(map(str, self.size.characters))
        return self.setting.folder.absolute() / "text" / f"{self.label.replace(' ', '-')}-{size}"

    def make_recipe(self, attention: str, seed: int) -> Recipe:
        size, (train, valid) = self.size, (str(self.text / f"{part}.txt") for part in PARTS)
        neutral = attention in NEUTRAL and attention != ORIGINAL
        values: dict[str, Any] = {
            "model": self.model, "data": train, "valid": valid, "block": size.block, "attention": attention,
            "neutral": neutral, "lora": size.lora, "optimiser": "adamw", "lr": size.rate,
            "schedule": "constant", "warmup": size.updates // 16, "clip": 1.0, "batch_tokens": size.update_tokens,
            "steps": size.updates, "evaluate_every": size.updates, "evaluate_at": size.evaluated[:-1],
            "checkpoint_every": max(1, size.updates // 4), "log_every": max(1, size.updates // 8), "seed": seed,
        }  # fmt: skip
        return resolve_recipe("language", {key: str(value) for key, value in values.items()})

    def plan_run(self, attention: str, seed: int) -> "Conversion":
        return Conversion(self.make_recipe(attention, seed), self.model_name, self.setting.folder.absolute())


@dataclass(frozen=True)
class Conversion(RecipeRun):
    """One mechanism in the model, trained with one seed; its row holds the learning curve."""

    trained: Recipe
    model: str  # its name in the ledger, so that a row does not depend on folders
    work: Path  # a folder above the texts, whose paths are not part of the recipe
    measure: str = "conversion"
    edition: int = 1

    @property
    def recipe(self) -> dict[str, Any]:
        values = describe_recipe(self.trained, self.work)
        values["model"] |= {"path": self.model}
        values["data"] |= {"tokenizer": self.model}
        return values

    @property
    def steps(self) -> int:
        return self.trained.training.steps

    def folder(self, place: Workplace) -> RunFolder:
        return RunFolder((place.folder / "runs" / self.trained.name()).absolute())

    def is_trained(self, place: Workplace) -> bool:
        return is_finished(self.folder(place))

    def count_steps(self, place: Workplace) -> int:
        return self.steps if self.is_trained(place) else count_steps(self.folder(place))

    def train(self, place: Workplace) -> None:
        vocabulary = prepare_vocabulary(self.trained, place)
        try:
            train_alone(self.trained, self.folder(place), vocabulary, place.device, export=False)
        except NotFiniteError as error:
            raise NotFiniteError(str(error).partition(";")[0]) from None  # the rest names folders of this machine

    def take_measure(self, place: Workplace) -> dict[str, Any]:
        folder, training = self.folder(place), self.trained.training
        rows = [row for row in folder.metrics() if "valid_loss" in row]
        trained = read_checkpoint(folder.last).part("model/")
        counts = {
            "mechanism_parameters": sum(x.numel() for name, x in trained.items() if is_added(name)),
            "lora_parameters": sum(x.numel() for name, x in trained.items() if name.endswith(LORA)),
        }
        return {
            "tokens": [row["step"] * training.batch_tokens for row in rows],
            "loss": [row["valid_loss"] for row in rows],
            **counts,
            "weights": list(hash_weights(cast(Any, self.trained.model).path).values()),
        }

    def clean(self, place: Workplace) -> None:
        shutil.rmtree(self.folder(place).path, ignore_errors=True)
