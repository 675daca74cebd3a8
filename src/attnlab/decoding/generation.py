"""Continue a text with a language model, token by token.

    p = softmax(logits / temperature)        <pad>, <s> and <unk> have the probability 0
    temperature = 0                          greedy: the likeliest token
    top_k                                    only the k likeliest tokens
    top_p                                    only the fewest likeliest tokens whose probabilities sum to at least top_p

A text ends at </s>. With words and subwords that is the end of a line; characters, bytes and tokenizers have no </s>.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from attnlab.config import Natural, NonNegative, check_fields
from attnlab.tasks.task import BOS, EOS, PAD, UNK
from attnlab.tasks.vocabulary import describe_unknown
from attnlab.training.runs import Run, open_run

TOKENS = 200  # of a continuation, unless the user says otherwise
HALF_CHARACTER = "\ufffd"  # ends a text whose last bytes are not a whole character yet


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Without a temperature: greedily, or at temperature 1 with top_k or top_p."""

    temperature: NonNegative | None = None
    top_k: int | None = None
    top_p: Annotated[float, "(0, 1]"] | None = None
    seed: Natural = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.temperature == 0 and (cut := next((key for key in ("top_k", "top_p") if getattr(self, key)), None)):
            raise ValueError(f"{cut} has no effect at temperature=0, which takes the likeliest token: give one of them")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or (self.temperature is None and self.top_k is None and self.top_p is None)

    def compute_probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each token (v,) from its logit (v,), in float64; greedy: 1 for the likeliest."""
        logits = logits.double().cpu().index_fill(0, torch.tensor([PAD, BOS, UNK]), -torch.inf)
        largest = logits.max()
        if not largest.isfinite():
            raise ValueError("the model's logits are not finite: its weights are damaged, or training diverged")
        if self.is_greedy:
            return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
        scaled, order = ((logits - largest) / (self.temperature or 1.0)).sort(descending=True, stable=True)
        kept = scaled.softmax(0)
        if self.top_k is not None:
            kept[self.top_k :] = 0.0
        if self.top_p is not None:
            kept[kept.cumsum(0) - kept >= self.top_p * kept.sum()] = 0.0
        return torch.zeros_like(kept).index_copy_(0, order, kept / kept.sum())


@torch.no_grad()
def generate_tokens(
    model: nn.Module, prompt: Sequence[int], *, tokens: int, sampling: Sampling, cached: bool = True
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, until </s>, which is not yielded, or until there are enough.

    cached   keep the keys and values of earlier tokens; False: read the whole text again for each token
    """
    if model.training:
        raise ValueError("the model is in training mode; call model.eval() before generating")
    decoder: Any = model
    device, draw = next(model.parameters()).device, torch.Generator().manual_seed(sampling.seed)
    state = decoder.start() if cached else None
    text = new = torch.tensor([list(prompt)], device=device)
    for _ in range(tokens):
        logits = decoder(text) if state is None else decoder.step(new, state)
        token = int(torch.multinomial(sampling.compute_probabilities(logits[0, -1]), 1, generator=draw))
        if token == EOS:
            return
        yield token
        new = torch.tensor([[token]], device=device)
        text = torch.cat([text, new], dim=1) if state is None else text


class TextGenerator:
    """Continues texts with a run. `notes` lists, after `stream`, what the reader of its output should know."""

    def __init__(self, run: Run, sampling: Sampling, *, tokens: int | None = None, cached: bool | None = None) -> None:
        check_language_model(run)
        if tokens is not None and tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}")
        has_cache = hasattr(run.model, "start")
        if cached and not has_cache:
            raise ValueError(f"{run.folder.path} is a Hugging Face model, which generates without a cache here")
        self.run, self.sampling, self.tokens = run, sampling, tokens
        self.cached = has_cache if cached is None else cached
        self.notes: list[str] = []

    def stream(self, prompt: str, *, number: int = 0) -> Iterator[str]:
        """Yield the text that follows the prompt, piece by piece; number is added to the seed."""
        task: Any = self.run.task
        ids = [int(token) for token in task.encode([prompt])[0]]
        own = ids[1:] if ids[:1] == [EOS] else ids
        if not own:
            raise ValueError("the prompt is empty: give the text to continue, for example --prompt ROMEO:")
        tokens = self._limit_tokens(len(ids))
        self._note_prompt(prompt, ids, tokens)
        sampling = replace(self.sampling, seed=self.sampling.seed + number)
        written = len(task.decode(own))
        model = self.run.model
        for token in generate_tokens(model, ids, tokens=tokens, sampling=sampling, cached=self.cached):
            own.append(token)
            text = task.decode(own)
            if not text.endswith(HALF_CHARACTER):
                yield text[written:]
                written = len(text)
        yield task.decode(own)[written:]

    def _limit_tokens(self, length: int) -> int:
        """Return how many tokens follow a prompt of `length` tokens. Raises ValueError if the positions are too few."""
        stack = getattr(self.run.model, "decoder", None)
        positions = None if stack is None else stack.embedding.limit
        if positions is None:
            return self.tokens or TOKENS
        room = positions + 1 - length
        if room < 1 or (self.tokens or 1) > room:
            counts = f"the prompt has {length} tokens and the model only {positions} positions"
            advice = f"ask for --tokens {room} or fewer" if room > 0 else "shorten the prompt"
            raise ValueError(f"{counts}; {advice}")
        return self.tokens or min(TOKENS, room)

    def _note_prompt(self, prompt: str, ids: Sequence[int], tokens: int) -> None:
        task: Any = self.run.task
        self.notes = []
        if UNK in ids:
            pieces = list(prompt) if getattr(task, "unit", None) == "character" else prompt.split()
            self.notes += filter(None, [describe_unknown(task, pieces)])
        block = getattr(task.config, "block", None)
        if block is not None and len(ids) + tokens - 1 > block:
            self.notes.append(f"texts of more than block={block} tokens are longer than any in training")


def generate(
    run: Run | str | Path,
    prompt: str,
    *,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "auto",
    allow_code: bool = False,
) -> str:
    """Return the text that follows a prompt, written by a language model that `attnlab train language` trained.

    run           a run, its folder, or its name in runs/
    tokens        number of tokens, at most; default: 200, or as many as the model has positions for
    temperature   0: greedy, the default without top_k and top_p; 1: the model's own probabilities
    allow_code    run the file of a user-written mechanism that the run names
    """
    opened = run if isinstance(run, Run) else open_run(run, device=device, allow_code=allow_code)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return "".join(TextGenerator(opened, sampling, tokens=tokens).stream(prompt))


def check_language_model(run: Run) -> None:
    """Raise ValueError if the run is not a language model of texts."""
    commands = {"translation": "attnlab translate translates", "classification": "attnlab predict gives its labels"}
    if (kind := run.task.architecture) != "language":
        raise ValueError(f"{run.folder.path} is a {kind} run and continues no text; {commands[kind]}")
    if not run.task.has_text:
        raise ValueError(f"{run.folder.path} learns sequences that are no text; attnlab evaluate gives its scores")
    if missing := [name for name in ("encode", "decode") if not hasattr(run.task, name)]:
        name = type(run.task).__name__
        raise ValueError(f"{run.folder.path} continues no text: its task {name} does not define {missing[0]}")
