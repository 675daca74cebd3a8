"""What a run on a GPU prepares in threads while its texts are read: CUDA, Triton, and kernels.

The kernels are compiled only while a vocabulary is learned, which takes seconds on one or a few cores and is needed
before the first batch. The model is not known before either. So a stand-in with the default number of words takes
batches of the usual widths, and what it compiles the model finds. If a guess is wrong, the first updates compile more.
"""

from contextlib import nullcontext, suppress
from threading import Thread
from typing import Any

import numpy as np
import torch

from attnlab.huggingface.fine_tuning import TunedConfig
from attnlab.mechanisms.kernels.launch import compile_ahead, start_triton
from attnlab.mechanisms.seeding import Seeds
from attnlab.models.presets import build
from attnlab.tasks.translation import TranslationConfig
from attnlab.tasks.vocabulary_cache import announce_learning
from attnlab.training.loop import is_captured, is_half, make_objective
from attnlab.training.recipe import Recipe

WIDTHS = (16, 32, 64)  # one for each tile of the kernels for short sentences


class Preparation:
    """A context in which a task is prepared, while threads start the device and compile kernels.

    At its end all threads have ended: they use torch's generators, and no other kernel may start while they compile.
    Nothing that they draw or compute is read later.
    """

    def __init__(self, recipe: Recipe, accelerator: Any) -> None:
        self.recipe, self.accelerator = recipe, accelerator
        self.threads: dict[Any, Thread] = {}  # by the function that runs in it
        self.announcement = announce_learning(self.compile_kernels)

    def __enter__(self) -> None:
        if self.accelerator.device.type == "cuda":
            self._run(start_device, self.accelerator.device)
        self.announcement.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.announcement.__exit__(*error)
        for thread in self.threads.values():
            thread.join()

    def compile_kernels(self) -> None:
        """Compile the kernels of the first updates once, if updates are captured."""
        config = self.recipe.training
        if is_captured(config, self.accelerator) and config.compile != "dynamic" and can_foresee(self.recipe):
            self._run(compile_early, self.recipe, self.accelerator.device)

    def _run(self, function: Any, *arguments: Any) -> None:
        if function not in self.threads:
            before = [*self.threads.values()]
            self.threads[function] = Thread(target=_run_after, args=(before, function, *arguments), daemon=True)
            self.threads[function].start()


def _run_after(before: list[Thread], function: Any, *arguments: Any) -> None:
    """Call a function after a thread. The run itself meets every error again, at a place that explains it."""
    for thread in before:
        thread.join()
    with suppress(Exception):
        function(*arguments)


def start_device(device: torch.device) -> None:
    """Start CUDA and Triton, which takes a second or more."""
    torch.empty(1, device=device)
    with torch.cuda.device(device):
        start_triton()


def can_foresee(recipe: Recipe) -> bool:
    """Return whether the model can be built and given batches before the task is prepared."""
    is_ours = not isinstance(recipe.model, TunedConfig) and not recipe.code()
    return is_ours and isinstance(recipe.data, TranslationConfig)


def compile_early(recipe: Recipe, device: torch.device) -> None:
    """Compile the kernels of an update for batches of WIDTHS."""
    config, on_gpu = recipe.training, device.type == "cuda"
    model = build(recipe.resolve_model(ForeseenTask(recipe.data)))  # type: ignore[arg-type]
    for parameter in model.to(device).parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if is_half(config, device) else torch.float32)
    objective = make_objective(model, config)
    seeds = Seeds(model, 1, device)
    with torch.cuda.device(device) if on_gpu else nullcontext(), compile_ahead(next(model.parameters()).device):
        for width in WIDTHS:
            rows = config.batch_examples or max(1, config.batch_tokens // width)
            tokens = torch.ones(rows, width, dtype=torch.int64, device=device)
            seeds.set_batch([config.seed], 0, 0)
            objective((tokens, tokens), tokens).backward()


class ForeseenTask:
    """What a model asks of a translation task, as it will be if the text supports the vocabulary."""

    architecture = "translation"

    def __init__(self, config: TranslationConfig) -> None:
        self.size = config.vocabulary

    def get_sizes(self) -> dict[str, int]:
        return {"source_vocabulary": self.size, "vocabulary": self.size}

    @property
    def parts(self) -> tuple[str, ...]:
        return ("train",)

    def get_lengths(self, part: str) -> tuple[np.ndarray, ...]:
        return (np.array([max(WIDTHS)]),)
